"""Platforms give the times of operators: computed from rates, or measured on another device."""
