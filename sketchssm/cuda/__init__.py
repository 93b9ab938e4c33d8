"""CUDA backend: the kernels of `cuda_src/`, compiled where they run, and the engines that launch them."""
