"""Kernels that move spans: ``host`` for paged KV in host memory, ``cuda`` for a GPU's."""
