"""Benchmarks of the kernels that move spans on a GPU."""
