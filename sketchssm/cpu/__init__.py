"""Numba engines: float32 states, rows and heads shared by threads."""
