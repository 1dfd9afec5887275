"""Whether a node can run on CUDA."""

from __future__ import annotations

from typing import Any

from npu_compiler.op_support import Support, is_op_supported

__all__ = ["is_cuda_op_supported"]


def is_cuda_op_supported(node: Any) -> Support:
    """Whether a node of an IR, given as for `is_op_supported`, can run on CUDA: it is lowered to find out."""
    return is_op_supported(node, target="cuda")
