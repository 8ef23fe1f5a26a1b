"""Guards: everything that a plan depends on; when any of it changes, the step is captured again."""
