"""Callers' arrays in and out."""
