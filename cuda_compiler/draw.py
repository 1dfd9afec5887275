"""Lowers draws of tokens: a block a row."""

from __future__ import annotations

from cuda_compiler.anchors import single_launch
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import CHUNK_BYTES
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.draw import Draw
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["DRAW", "lower_draw"]

_THREADS = 1024
_CAPACITY = 2048  # tokens that are put in order at a time
DRAW = KernelTemplate(
    "draw",
    params="int length, logits_row, logits_column, limits_row, limits_column, top_k_row, words_row, words_column",
    macros="a_t THREADS CAPACITY CHUNK",
    inputs="logits limits top_k words",
    threads=_THREADS,
    before="draw_entries.cuh",
    files="sort_network.cuh draw_bins.cuh",
)


@lowering_of(Draw)
def lower_draw(draw: Draw, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    logits = draw.logits
    chunk = CHUNK_BYTES // logits.dtype.size
    launch = Launch(
        DRAW,
        grid=(draw.rows, 1, 1),
        values=draw.sizes,
        macros={
            "a_t": CUDA.storage[logits.dtype.name],
            "THREADS": _THREADS,
            "CAPACITY": _CAPACITY,
            "CHUNK": chunk if logits.has_chunks(chunk) else 1,
        },
        inputs=draw.arguments,
        flops=draw.flops,
    )
    return [single_launch(launch, group, lowering)]
