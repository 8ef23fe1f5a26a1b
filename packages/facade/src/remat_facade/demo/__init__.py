"""``remat demo``: a short training run with a plan beside one without."""
