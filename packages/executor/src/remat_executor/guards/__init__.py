"""What a plan depends on beside shapes: when one of these changes, the step is captured again."""
