"""Lowers draws of tokens: a threadgroup a row."""

from __future__ import annotations

from metal_compiler.anchors import single_launch
from metal_compiler.dialect import METAL
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.draw import Draw
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["DRAW", "lower_draw"]

_THREADS = 256
_CAPACITY = 1024  # tokens that are put in order at a time
DRAW = KernelTemplate(
    "draw",
    params="int length, logits_row, logits_column, limits_row, limits_column, top_k_row, words_row, words_column",
    macros="a_t THREADS CAPACITY",
    inputs="logits limits top_k words",
    threads=_THREADS,
    files="draw_bins.metal",
)


@lowering_of(Draw)
def lower_draw(draw: Draw, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    launch = Launch(
        DRAW,
        grid=(draw.rows, 1, 1),
        values=draw.sizes,
        macros={"a_t": METAL.storage[draw.logits.dtype.name], "THREADS": _THREADS, "CAPACITY": _CAPACITY},
        inputs=draw.arguments,
        flops=draw.flops,
    )
    return [single_launch(launch, group, lowering)]
