"""Lowers draws of tokens: a block a row, or a cluster of blocks."""

from __future__ import annotations

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import CHUNK_BYTES
from npu_compiler.artifact.plan import CallOption, KernelCall, Step, choice_of
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.draw import Draw
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["DRAW", "lower_draw"]

_THREADS = 1024
_WARPS = _THREADS // 32
_CAPACITY = 2048  # tokens that are put in order at a time
_BINS = 2048
_OTHER_BYTES = 2048  # of shared memory, beside bins and lists
_MOST_PARTS = 8  # of a row
_LEAST_TOKENS = 2 * _THREADS  # of a part
DRAW = KernelTemplate(
    "draw",
    params="int length, logits_row, logits_column, limits_row, limits_column, top_k_row, words_row, words_column",
    macros="a_t THREADS CAPACITY WIDE PACKED ITEMS RUN CHUNK PARTS BINS HELD SHARED_BYTES",
    inputs="logits limits top_k words",
    threads=_THREADS,
    shared_bytes=None,
    before="draw_entries.cuh",
    files="tensor_cores.cuh clusters.cuh sort_network.cuh sort_registers.cuh draw_row.cuh draw_blocks.cuh "
    "draw_bins.cuh draw_list.cuh",
)


@lowering_of(Draw)
def lower_draw(draw: Draw, group: Group, lowering: Lowering) -> list[Step]:
    """One launch: a cluster of blocks a row where rows leave multiprocessors idle, else a block.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    around = AnchoredGroup.of(group, lowering)
    options = [CallOption("", (_launch(draw, 1, around),))]
    parts = _parts(draw, around.device)
    if parts > 1:
        options.insert(0, CallOption(CLUSTERS, (_launch(draw, parts, around),)))
    return [*choice_of(options)]


def _parts(draw: Draw, device: DeviceModel) -> int:
    """Blocks for each row."""
    if not offers(device, CLUSTERS):
        return 1
    held, parts = cluster_cores(device), _MOST_PARTS
    while parts > 1 and (draw.rows * parts > held[parts] or draw.logits.shape[1] < parts * _LEAST_TOKENS):
        parts //= 2
    return parts


def _launch(draw: Draw, parts: int, around: AnchoredGroup) -> KernelCall:
    logits = draw.logits
    chunk = CHUNK_BYTES // logits.dtype.size
    chunk = chunk if logits.has_chunks(chunk) else 1
    tokens = ceil_div(ceil_div(logits.shape[1], chunk), parts * _WARPS) * chunk * _WARPS
    shared = 12 * _BINS + 16 * _CAPACITY + _OTHER_BYTES + (12 * _BINS // parts if parts > 1 else 0)
    with_tokens = shared + tokens * logits.dtype.size
    is_held = with_tokens <= (around.device.shared_bytes if parts > 1 else around.device.core_shared_bytes // 2)
    shared = with_tokens if is_held else shared
    launch = Launch(
        DRAW,
        grid=(draw.rows * parts, 1, 1),
        values=draw.sizes,
        macros={
            "a_t": CUDA.storage[logits.dtype.name],
            "THREADS": _THREADS,
            "CAPACITY": _CAPACITY,
            "WIDE": 0,
            "PACKED": 1,
            "ITEMS": _CAPACITY // _THREADS,
            "RUN": _CAPACITY,
            "CHUNK": chunk,
            "PARTS": parts,
            "BINS": _BINS,
            "HELD": tokens if is_held else 0,
            "SHARED_BYTES": shared,
        },
        inputs=draw.arguments,
        flops=draw.flops,
        shared_bytes=shared,
        extension=cluster_along_x(parts),
    )
    return around.launch(launch, 1)
