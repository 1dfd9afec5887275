"""Sizes that attention kernels are compiled for, and where their operands lie."""

from __future__ import annotations

from cuda_compiler.attention.mask import mask_values
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import CHUNK
from npu_compiler.artifact.plan import Argument
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.cache_codes import is_coded
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.target import Lowering

__all__ = ["MAX_ROWS", "PIECE", "SET", "SIZE_MACROS", "bindings", "element_bytes", "operand_values", "padded"]
__all__ += ["least_depth", "piece_bytes", "scale_bytes", "size_macros", "suits_warps"]

PIECE = 16
"""Positions that a warp takes at a time; as in attention_warp.cuh."""

SET = 8
"""Rows that tensor cores multiply at a time."""

MAX_ROWS = 16
"""Rows of queries that warps have at a time, over a head of keys."""

_MAX_WIDTH = 256  # sums of eight rows that a warp holds, over the sets of eight rows
_ROW_GAP = 16  # bytes between rows of a piece in shared memory
_LINE = 128  # bytes of all banks: rows of codes that are whole lines are permuted in place of a gap

SIZE_MACROS = "tile_t HEAD_SIZE VALUE_SIZE GROUPS SHARED LENGTH SCALE SINK_STEP? sink_t?"


def padded(size: int) -> int:
    """A head's size in whole steps of the tensor cores."""
    return ceil_div(size, 16) * 16


def size_macros(problem: Attention) -> dict[str, object]:
    """The data type, the scale, and the sizes that do not depend on how the work is divided."""
    capped = {"SOFT_CAP": CUDA.literal(problem.cap, FLOAT32)} if problem.cap else {}
    sinks: dict[str, object] = {}
    if problem.sinks is not None:
        sinks = {"SINK_STEP": problem.sinks.strides[0], "sink_t": CUDA.storage[problem.sinks.dtype.name]}
    return {
        **capped,
        **sinks,
        "tile_t": CUDA.storage[problem.q.dtype.name],
        "HEAD_SIZE": problem.size,
        "VALUE_SIZE": problem.value_size,
        "GROUPS": problem.groups,
        "SHARED": problem.shared,
        "LENGTH": problem.length,
        "SCALE": CUDA.literal(problem.scale, FLOAT32),
    }


def suits_warps(problem: Attention, rows: int) -> bool:
    """Whether warps hold the sums of so many rows, and copy keys and values in whole chunks."""
    fits = rows <= MAX_ROWS and ceil_div(rows, SET) * padded(problem.value_size) <= _MAX_WIDTH
    return fits and not problem.causal and problem.k.has_chunks(CHUNK) and problem.v.has_chunks(CHUNK)


def element_bytes(problem: Attention) -> int:
    """Of an element of keys and values in shared memory, a code or a number."""
    return 1 if is_coded(problem.k) else 2


def scale_bytes(problem: Attention) -> int:
    """Of the scales of a position's keys and values; 0 where they are numbers."""
    return sum(operand.scale.dtype.size for operand in (problem.k, problem.v) if is_coded(operand))


def piece_bytes(problem: Attention) -> int:
    """Shared memory for one piece of a warp: keys, values and their scales, later the results of a set of rows.

    As in attention_warp.cuh.
    """
    each = element_bytes(problem)
    rows = [padded(size) * each for size in (problem.size, problem.value_size)]
    gaps = sum(0 if each == 1 and row % _LINE == 0 else _ROW_GAP for row in rows)
    return max(PIECE * (sum(rows) + gaps + scale_bytes(problem)), _set_bytes(problem))


def least_depth(problem: Attention, rows: int) -> int:
    """Pieces of a warp at the least: its results of so many rows lie where these were, as in attention_warp.cuh."""
    return ceil_div(ceil_div(rows, SET) * _set_bytes(problem), piece_bytes(problem))


def _set_bytes(problem: Attention) -> int:
    """Of the results of a set of rows."""
    return SET * (padded(problem.value_size) + 4) * FLOAT32.size


def operand_values(problem: Attention, state_rows: int) -> dict[str, int]:
    """Parameters that say how many rows there are, and where the operands, the mask and its blocks' states lie."""
    return {"rows": problem.rows, **problem.strides("q", "k", "v"), **mask_values(problem, state_rows)}


def bindings(problem: Attention, states: Argument, parts_bytes: int, lowering: Lowering) -> dict[str, Argument]:
    """What an attention kernel binds: the operands, the states of the mask's blocks, and where its parts are left.

    Args:
        problem: The attention; a mask that it has not is never read, nor are parts where there are none.
        states: Of each block of the mask.
        parts_bytes: What blocks that share positions leave for each other.
        lowering: Where the trace's tensors are.
    """
    operands = {"q": problem.q, "k": problem.k, "v": problem.v, "mask": problem.mask or problem.k}
    partial = Argument(lowering.scratch(parts_bytes), writes=True) if parts_bytes else problem.k.argument
    if problem.sinks is not None:
        operands["sinks"] = problem.sinks
    return {**{name: operand.argument for name, operand in operands.items()}, "states": states, "partial": partial}
