"""Random graphs, schedules and strategies for tests of whatever plans."""
