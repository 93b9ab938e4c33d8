"""Numba engines: float32 states, parallel over rows and heads."""
