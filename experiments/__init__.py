"""Experiments that can be run again: each says what it will do, does it, and is verified apart."""
