"""Convolution and pooling on CUDA."""
