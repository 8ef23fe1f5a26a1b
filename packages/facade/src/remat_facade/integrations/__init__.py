"""Where remat meets other programs: one a file."""
