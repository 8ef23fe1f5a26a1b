"""Host memory for the values that a plan moves off the device."""

__version__ = "0.1.0"
