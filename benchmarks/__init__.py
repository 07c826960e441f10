"""`make bench` and `make bench-check`: what KMesh costs and gives, each figure beside its peer.

Not part of the package. See ``benchmarks/README.md``.
"""
