"""Inspection of modules and objects: their tensors, their attributes, and changes of them."""
