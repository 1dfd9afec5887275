"""Tiles of results that simdgroups compute: which sizes, and what they can read 16 bytes at a time."""
