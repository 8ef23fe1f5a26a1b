"""Costs of operators: measured, cached on disk, or estimated by a platform."""
