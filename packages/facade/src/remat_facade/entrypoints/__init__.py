"""The classes and functions that users call."""
