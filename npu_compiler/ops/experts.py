"""Mixtures of experts: products of groups of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_compiler.dtypes import dtype
from npu_compiler.ops.linear import product
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.symbolic import OpRefusal, Tensor


def _flops(operands: Sequence[tuple[int, ...]], made: int) -> int | None:
    """Each row meets one matrix."""
    return 2 * made * operands[0][-1] if operands and operands[0] else None


@op("transformers.grouped_mm_fallback.default", work=Work.ANCHOR, is_learned=True, flops=_flops)
def grouped_product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """``input[s] @ weight[g]`` for each row s of group g, whose rows end at ``offs[g]``; zeros behind the last one.

    Input [S, K], weight [G, K, N], offs [G].
    """
    sizes = len(input.shape), len(weight.shape), len(offs.shape)
    if sizes != (2, 3, 1) or input.shape[1] != weight.shape[1] or offs.shape[0] != weight.shape[0]:
        shapes = ", ".join(str(list(t.shape)) for t in (input, weight, offs))
        raise OpRefusal(f"given {shapes}, expected [rows, k], [groups, k, columns] and [groups]")
    if offs.dtype.is_float or input.dtype != weight.dtype or not input.dtype.is_float:
        given = f"{input.dtype}, {weight.dtype} and {offs.dtype}"
        raise OpRefusal(f"given {given}, expected rows and matrices of one floating-point type, and integers")
    shape = (input.shape[0], weight.shape[2])
    return input.trace.anchor("grouped_matmul", (input, weight, offs), shape, input.dtype)


@op("aten._grouped_mm.default", work=Work.ANCHOR, is_learned=True, flops=_flops)
def grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """The same, or a batch of products where there are no groups."""
    if bias is not None:
        raise OpRefusal("given a bias, expected none, as of PyTorch")
    if offs is None:
        if len(self.shape) != 3 or len(mat2.shape) != 3:
            raise OpRefusal(f"given {list(self.shape)} and {list(mat2.shape)} without offs, expected three dimensions")
        result = product(self, mat2)
    else:
        result = grouped_product(self, mat2, offs)
    return result if out_dtype is None else result.cast(dtype(out_dtype))
