"""Tensors that become codes of a byte as they are computed, with a scale for each row: what products of codes read."""

from __future__ import annotations

from npu_compiler.dtypes import FLOAT32, INT32
from npu_compiler.dtypes import dtype as data_type
from npu_compiler.ops.reduction import greatest
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.coded import LARGEST, LEAST_SCALE, size_bits
from npu_compiler.tensor.expr import Call
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply

__all__ = ["quantize"]


def _rows_of_input(call: RowCall) -> Passage | None:
    return Passage({"input": call.dim}) if call.dim < call.rank - 1 else None


@op("npu_codes.quantize.default", work=Work.ROWS, rows=_rows_of_input, counts=True)
def quantize(input: Tensor, dtype: object) -> tuple[Tensor, Tensor]:
    """``input / scale`` as codes, rounded to nearest, where the scale makes the largest of each row the largest code.

    Args:
        input: [..., K], floating point.
        dtype: Of the codes: one of `LARGEST`.

    Returns:
        The codes, [..., K], and the scales, [..., 1] of float32.
    """
    kind = data_type(dtype)
    if kind not in LARGEST or not input.dtype.is_float or not input.shape:
        raise OpRefusal(
            f"given dtype={dtype} for {input.dtype}{list(input.shape)}, expected rows of floating point as "
            f"{' or '.join(map(str, LARGEST))}"
        )
    most = LARGEST[kind]
    numbers = input.cast(FLOAT32)
    (largest,) = reduce(numbers.with_expr(size_bits(numbers.expr), INT32), greatest, [-1], True)
    size = largest.with_expr(Call("of_bits", (largest.expr,), FLOAT32), FLOAT32)
    scales = apply("max", size * (1 / most), LEAST_SCALE).realize()
    codes = numbers * (1.0 / scales)
    return (codes if kind.coding else apply("rint", codes)).cast(kind), scales
