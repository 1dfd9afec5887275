"""Whether a node can run on Metal."""

from __future__ import annotations

from typing import Any

from npu_compiler.op_support import Support, is_op_supported
from npu_compiler.op_support import get_supported_ops as supported_ops

__all__ = ["get_supported_ops", "is_metal_op_supported"]


def get_supported_ops() -> tuple[str, ...]:
    """The ATen names of the ops that run on Metal in some form, sorted."""
    return supported_ops("metal")


def is_metal_op_supported(node: Any) -> Support:
    """Whether a node of an IR, or an op, given as for `is_op_supported`, can run on Metal: lowering it finds out."""
    return is_op_supported(node, target="metal")
