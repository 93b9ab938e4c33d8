"""The method in plain NumPy and float64: slow, close to the paper, and the reference for every other backend."""
