"""What each operator costs: measured, kept in a cache, or estimated by a platform."""
