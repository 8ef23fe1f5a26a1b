"""Capture, measure, lower and run PyTorch models under a plan, and meter the memory they use."""

__version__ = "0.1.0"
