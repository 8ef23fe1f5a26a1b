"""Read and write graphs, schedules and plans as JSON files; reading is bounded, writing is atomic."""
