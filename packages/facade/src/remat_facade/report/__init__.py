"""Reports on plans: memory over time, recomputed ops and tables, as data, PNG and HTML."""
