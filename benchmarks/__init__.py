"""Measurements, each a command of its own; see README.md."""
