"""Dynamic programming over chains of blocks."""
