"""Every op, once, by family. Importing this package fills the registry."""

from npu_compiler.ops import (
    activations,
    attention,
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    normalization,
    padding,
    pointwise,
    pooling,
    quantization,
    rearranging,
    reduction,
    resizing,
    rotary,
    transposed,
    unlowered,
    views,
)
from npu_compiler.ops.registry import OpDefinition, definition, get_supported_ops

__all__ = ["OpDefinition", "definition", "get_supported_ops"]
__all__ += [
    "activations",
    "attention",
    "convolution",
    "creation",
    "elementwise",
    "indexing",
    "linear",
    "normalization",
    "padding",
    "pointwise",
    "pooling",
    "quantization",
    "rearranging",
    "reduction",
    "resizing",
    "rotary",
    "transposed",
    "unlowered",
    "views",
]
