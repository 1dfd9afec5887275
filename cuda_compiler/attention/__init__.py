"""Attention on CUDA: of many rows, of a decode step, and for any device."""
