"""Decode heads: what a caller steps, and which engine runs it."""
