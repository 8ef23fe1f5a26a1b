"""Looking at modules and objects: their tensors, their attributes, and what has changed."""
