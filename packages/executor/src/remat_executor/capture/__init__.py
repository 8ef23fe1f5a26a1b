"""Capture: from a module and a sample to one joint graph of forward and backward."""
