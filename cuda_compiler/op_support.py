"""Whether a node can run on CUDA."""

from __future__ import annotations

from typing import Any

from npu_compiler.op_support import Support, is_op_supported
from npu_compiler.op_support import get_supported_ops as supported_ops

__all__ = ["get_supported_ops", "is_cuda_op_supported"]


def get_supported_ops() -> tuple[str, ...]:
    """The ATen names of the ops that run on CUDA in some form, sorted."""
    return supported_ops("cuda")


def is_cuda_op_supported(node: Any) -> Support:
    """Whether a node of an IR, or an op, given as for `is_op_supported`, can run on CUDA: it is lowered to find out."""
    return is_op_supported(node, target="cuda")
