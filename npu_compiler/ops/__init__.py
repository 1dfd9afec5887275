"""Every op, once, by family. Importing this package fills the registry."""

from npu_compiler.ops import (
    activations,
    attention,
    codes,
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    normalization,
    pointwise,
    quantization,
    rearranging,
    reduction,
    rotary,
    unlowered,
    views,
)
from npu_compiler.ops.registry import OpDefinition, definition, get_supported_ops

__all__ = ["OpDefinition", "definition", "get_supported_ops"]
__all__ += [
    "activations",
    "attention",
    "codes",
    "convolution",
    "creation",
    "elementwise",
    "indexing",
    "linear",
    "normalization",
    "pointwise",
    "quantization",
    "rearranging",
    "reduction",
    "rotary",
    "unlowered",
    "views",
]
