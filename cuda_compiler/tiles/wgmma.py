"""Products by warpgroups: `wgmma`, which only compute capability 9.0 has."""

from __future__ import annotations

from functools import cache

__all__ = ["LINE", "WARPGROUP_ROWS", "warpgroup_product"]

LINE = 64  # elements of 16 bits along k that lie together in shared memory: 128 bytes
WARPGROUP_ROWS = 64  # that a warpgroup multiplies at a time
_TYPES = {"float16": "f16", "bfloat16": "bf16", "int8": "s8"}


@cache  # a model has the same few in many kernels
def warpgroup_product(
    columns: int,
    dtype: str,
    name: str = "multiply_64_rows",
    *,
    a_in_registers: bool = False,
    b_along_columns: bool = False,
) -> str:
    """A device function that starts adding [64, 16] by [16, columns] to a warpgroup's results.

    Codes of int8 are [64, 32] by [32, columns]; their sums are integers, whose bits the results hold.

    Args:
        columns: Columns of the second operand: a multiple of 8, at most 256.
        dtype: Data type of both operands, `float16`, `bfloat16` or `int8`; the last from shared memory along k alone.
        name: The function's name; it takes the sums, both operands, and whether the sums are added to.
        a_in_registers: Whether the first operand is four registers of each thread, not in shared memory.
        b_along_columns: Whether lines of the second operand in shared memory run along its columns, not its rows.
    """
    blocks = columns // 8
    registers = blocks * 4
    sums = ", ".join(f"%{number}" for number in range(registers))
    coded = dtype == "int8"
    held = '"+r"(reinterpret_cast<int&>(sum[{}][{}]))' if coded else '"+f"(sum[{}][{}])'
    outputs = ", ".join(held.format(block, i) for block in range(blocks) for i in range(4))
    if a_in_registers:
        parameters, first, inputs = "const uint (&a)[4]", [registers + i for i in range(4)], '"r"(a[0]), "r"(a[1]), '
        inputs += '"r"(a[2]), "r"(a[3])'
        left = f"{{{', '.join(f'%{number}' for number in first)}}}"
    else:
        parameters, inputs, left = "uint64 a", '"l"(a)', f"%{registers}"
    right = registers + (4 if a_in_registers else 1)
    kind = _TYPES[dtype]
    size, sum_kind = (32, "s32") if coded else (16, "f32")
    instruction = f"wgmma.mma_async.sync.aligned.m{WARPGROUP_ROWS}n{columns}k{size}.{sum_kind}.{kind}.{kind}"
    transposed = "" if a_in_registers else "0, "
    options = "" if coded else f", 1, 1, {transposed}{int(b_along_columns)}"
    return "\n".join(
        [
            f"__device__ __forceinline__ void {name}(float (&sum)[{blocks}][4], {parameters}, uint64 b, int adds = 1)",
            "{",
            "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)",
            '    asm volatile("{.reg .pred adds;\\n"',
            f'                 "setp.ne.b32 adds, %{right + 1}, 0;\\n"',
            f'                 "{instruction} "',
            f'                 "{{{sums}}}, {left}, %{right}, adds{options};}}"',
            f"                 : {outputs}",
            f'                 : {inputs}, "l"(b), "r"(adds));',
            "#endif",
            "}",
        ]
    )
