"""Comparisons: systems on recorded traces, times, plans chosen by measurement, pictures."""
