"""Products by warpgroups: `wgmma`, which only compute capability 9.0 has."""

from __future__ import annotations

from functools import cache

from cuda_compiler.dialect import CUDA
from npu_compiler.dtypes import FLOAT8_E4M3FN

__all__ = ["LINE", "WARPGROUP_ROWS", "warpgroup_product"]

LINE = 64  # elements of 16 bits, or pairs of bytes, along k that lie together in shared memory: 128 bytes
WARPGROUP_ROWS = 64  # that a warpgroup multiplies at a time
_OF_BYTES = {FLOAT8_E4M3FN.name: "e4m3.e4m3", "int8": "s8.s8", "uint8": "u8.s8"}
_TYPES = {"float16": "f16.f16", "bfloat16": "bf16.bf16", **_OF_BYTES}


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

    Of operands of a byte these are 16 pairs; the sums of integers are integers, of which `sum` has the bits.

    Args:
        columns: Columns of the second operand: a multiple of 8, at most 256.
        dtype: Data type of both operands: `float16` or `bfloat16`; `int8` or 8-bit floats from shared memory; `uint8`
            of such a first operand, where the second one is `int8`.
        name: The function's name; it takes the sums, both operands, and whether the sums are added to.
        a_in_registers: Whether the first operand is four registers of each thread, not in shared memory.
        b_along_columns: Whether lines of the second operand in shared memory run along its columns, not its rows.
    """
    blocks = columns // 8
    registers = blocks * 4
    sums = ", ".join(f"%{number}" for number in range(registers))
    is_integer, in_bytes = dtype in ("int8", "uint8"), dtype in _OF_BYTES
    form = '"+r"(reinterpret_cast<int&>(sum[{}][{}]))' if is_integer else '"+f"(sum[{}][{}])'
    outputs = ", ".join(form.format(block, i) for block in range(blocks) for i in range(4))
    if a_in_registers:
        parameters, first, inputs = "const uint (&a)[4]", [registers + i for i in range(4)], '"r"(a[0]), "r"(a[1]), '
        inputs += '"r"(a[2]), "r"(a[3])'
        left = f"{{{', '.join(f'%{number}' for number in first)}}}"
    else:
        parameters, inputs, left = "uint64 a", '"l"(a)', f"%{registers}"
    right = registers + (4 if a_in_registers else 1)
    kind = _TYPES[dtype]
    transposed = f", {'' if a_in_registers else '0, '}{int(b_along_columns)}"
    behind = "" if is_integer else f", 1, 1{'' if in_bytes else transposed}"
    shape = f"m{WARPGROUP_ROWS}n{columns}k{32 if in_bytes else 16}.{'s32' if is_integer else 'f32'}"
    return "\n".join(
        [
            f"{CUDA.inline} void {name}(float (&sum)[{blocks}][4], {parameters}, uint64 b, int adds = 1)",
            "{",
            "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)",
            '    asm volatile("{.reg .pred adds;\\n"',
            f'                 "setp.ne.b32 adds, %{right + 1}, 0;\\n"',
            f'                 "wgmma.mma_async.sync.aligned.{shape}.{kind} "',
            f'                 "{{{sums}}}, {left}, %{right}, adds{behind};}}"',
            f"                 : {outputs}",
            f'                 : {inputs}, "l"(b), "r"(adds));',
            "#endif",
            "}",
        ]
    )
