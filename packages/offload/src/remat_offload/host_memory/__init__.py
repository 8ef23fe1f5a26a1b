"""Host memory for values that are placed there: a pool of pinned blocks."""
