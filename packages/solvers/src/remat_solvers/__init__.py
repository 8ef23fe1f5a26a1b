"""Solvers that plan a training step inside a memory budget, one a file, all judged by one referee."""

__version__ = "0.1.0"
