"""Train any PyTorch model inside a memory budget given in bytes, with the same outputs and gradients."""

__version__ = "0.1.0"
