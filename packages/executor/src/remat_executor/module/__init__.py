"""`PlannedModule`, and the pipeline from a call to a planned step."""
