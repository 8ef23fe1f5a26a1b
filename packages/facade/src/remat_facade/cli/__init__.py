"""The command ``remat``."""
