"""Integrations with other libraries, one per file."""
