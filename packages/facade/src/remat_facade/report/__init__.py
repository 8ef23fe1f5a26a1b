"""What a plan looks like: memory over time, what is recomputed, and tables, as data, PNG and HTML."""
