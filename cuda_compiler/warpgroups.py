"""Tiles multiplied by warpgroups: `wgmma`, which only compute capability 9.0 has."""

from __future__ import annotations

__all__ = ["warpgroup_product"]

_ROWS = 64  # that a warpgroup multiplies at a time
_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def warpgroup_product(columns: int, dtype: str) -> str:
    """A device function ``multiply_64_rows`` that adds [64, 16] by [16, columns] to a warpgroup's results.

    Args:
        columns: Columns of the second operand: a multiple of 8, at most 256.
        dtype: Data type of both operands, `float16` or `bfloat16`.
    """
    blocks = columns // 8
    registers = blocks * 4
    names = ", ".join(f"%{number}" for number in range(registers))
    outputs = ", ".join(f'"+f"(sum[{block}][{i}])' for block in range(blocks) for i in range(4))
    kind = _TYPES[dtype]
    return "\n".join(
        [
            "__device__ __forceinline__ void multiply_64_rows(",
            f"    float (&sum)[{blocks}][4], unsigned long long a, unsigned long long b)",
            "{",
            "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)",
            f'    asm volatile("wgmma.mma_async.sync.aligned.m{_ROWS}n{columns}k16.f32.{kind}.{kind} "',
            f'                 "{{{names}}}, %{registers}, %{registers + 1}, 1, 1, 1, 0, 0;"',
            f"                 : {outputs}",
            '                 : "l"(a), "l"(b));',
            "#endif",
            "}",
        ]
    )
