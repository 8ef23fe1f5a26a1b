"""When values are copied to the host and back within an order."""
