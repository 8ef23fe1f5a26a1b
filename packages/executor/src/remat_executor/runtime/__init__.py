"""Ways to run the lowered graphs of a plan: one runtime a file."""
