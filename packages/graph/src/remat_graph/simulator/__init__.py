"""Simulate schedules: peak bytes, time, and the first step that cannot run."""
