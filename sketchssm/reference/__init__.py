"""The method in plain NumPy and float64: slow, readable beside the paper, and the judge of every other backend."""
