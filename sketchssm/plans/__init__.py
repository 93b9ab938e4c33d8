"""Plans, the files that hold them, and the byte model."""
