"""Make random graphs, schedules and hypothesis strategies for tests."""
