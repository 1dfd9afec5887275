"""Every op, once, by family. Importing this package fills the registry."""

from npu_compiler.ops import (
    attention,
    convolution,
    creation,
    elementwise,
    indexing,
    linear,
    normalization,
    reduction,
    rotary,
    unlowered,
    views,
)
from npu_compiler.ops.registry import OpDefinition, definition, get_supported_ops

__all__ = ["OpDefinition", "definition", "get_supported_ops"]
__all__ += [
    "attention",
    "convolution",
    "creation",
    "elementwise",
    "indexing",
    "linear",
    "normalization",
    "reduction",
    "rotary",
    "unlowered",
    "views",
]
