"""The sections of `gpu_first.py`: what must be right before anything else is measured on a device."""
