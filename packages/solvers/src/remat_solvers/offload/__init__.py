"""Where parameters and optimizer states are placed, and when they are copied."""
