"""Calibration: second moments of traces, sketch bases, rank scores and rank allocation."""
