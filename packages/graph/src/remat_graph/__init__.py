"""Graphs, schedules, the referee and the cost platforms: plain data that needs no torch and no GPU."""

__version__ = "0.1.0"
