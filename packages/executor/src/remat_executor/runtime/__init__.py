"""Runtimes, which run the lowered graphs of a plan: one file each."""
