"""Tiles of results on tensor cores: which sizes, what they cost, how they are launched."""
