"""Lowering: from a schedule to FX graphs that a runtime can run."""
