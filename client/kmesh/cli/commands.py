"""All commands, on one app."""

from kmesh.cli import bench, explain, export, families, flights, raw, steer, top, watch
from kmesh.cli.app import app

__all__ = [
    "app",
    "bench",
    "explain",
    "export",
    "families",
    "flights",
    "raw",
    "steer",
    "top",
    "watch",
]
