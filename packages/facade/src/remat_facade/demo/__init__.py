"""``remat demo``: a short training run with a plan, compared to one without."""
