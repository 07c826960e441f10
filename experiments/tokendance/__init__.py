"""Sibling requests that hold the same content at other positions, stored as exact recipes."""
