"""Graphs, schedules and plans as JSON files, read with bounds and written whole."""
