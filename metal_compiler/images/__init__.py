"""Convolution and pooling on Metal."""
