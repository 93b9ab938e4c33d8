"""Runs the CUDA kernels on the host: a small CUDA for g++ and a stand-in for CuPy. See README.md."""
