"""Metal devices: Apple GPUs through pyobjc, and the software GPU, which has the same names."""

from metal_runtime.backend import MetalBackend, MetalBuffer

__all__ = ["MetalBackend", "MetalBuffer"]
