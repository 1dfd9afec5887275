"""Sizes that every attention kernel is compiled for."""

from __future__ import annotations

from cuda_compiler.dialect import CUDA
from npu_compiler.codegen.attention import AttentionProblem
from npu_compiler.dtypes import FLOAT32

__all__ = ["padded", "size_macros"]


def padded(size: int) -> int:
    """A head's size in whole steps of the tensor cores."""
    return -(-size // 16) * 16


def size_macros(problem: AttentionProblem) -> dict[str, object]:
    """The data type, the scale, and the sizes that do not depend on how the work is divided."""
    return {
        "tile_t": CUDA.storage[problem.q.tensor.dtype.name],
        "HEAD_SIZE": problem.size,
        "VALUE_SIZE": problem.value_size,
        "GROUPS": problem.groups,
        "SHARED": problem.shared,
        "LENGTH": problem.length,
        "SCALE": CUDA.literal(problem.scale, FLOAT32),
    }
