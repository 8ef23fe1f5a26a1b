"""Cost platforms: where the times of operators come from."""
