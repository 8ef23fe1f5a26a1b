"""Compiled inner loops; importing this package compiles nothing."""
