"""What blocks of an attention's mask do, found out once for all layers that share the mask."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import CHUNK_BYTES
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BOOL, FLOAT16, FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.view import View

__all__ = ["MASK_MACROS", "MASK_STATES", "MaskBlocks", "has_states", "mask_macros", "mask_states", "mask_values"]

_MAX_GRID = 65535  # blocks along y and along z
_THREADS = 128
_WARP = 32

_PLACES = "mask_batch, mask_head, mask_row, mask_step"
_PARAMS = f"{_PLACES}, state_batch, state_head, state_parts"
MASK_MACROS = "mask_t MASK MASK_CLOSED MASK_PERIOD? MASK_STATES"
MASK_STATES = KernelTemplate(
    "mask_states",
    params=f"int rows, length, heads, {_PLACES}",
    macros="mask_t MASK_CLOSED STATE_ROWS BLOCK CHUNK SIDE_BY_SIDE",
    inputs="mask",
    outputs="states",
    threads=_THREADS,
    files="mask.cuh",
)


@dataclass(frozen=True)
class MaskBlocks:
    """What `mask_states` found out about a mask.

    Attributes:
        states: Of each block.
        rows, positions: Size of a block.
        ready: Whether the states are there before the launch ahead begins.
    """

    states: Argument
    rows: int
    positions: int
    ready: bool


def has_states(problem: Attention, block: int) -> bool:
    """Whether it is worth it to find out what blocks of the mask do: one block of positions is read as it is."""
    return problem.mask is not None and problem.length > block


def mask_macros(problem: Attention, block: int) -> dict[str, object]:
    """What `mask.cuh` and the kernels that read a mask, in blocks of so many positions, expect to be defined."""
    mask = problem.mask.dtype if problem.mask is not None else BOOL
    # minus infinity, or a number so low that the weight vanishes beside any position that is open
    closed = -65504.0 if mask == FLOAT16 else -1e37
    macros: dict[str, object] = {
        "mask_t": CUDA.storage[mask.name],
        "MASK": 0 if problem.mask is None else 1 if mask == BOOL else 2,
        "MASK_CLOSED": CUDA.literal(closed, FLOAT32),
        "MASK_STATES": int(has_states(problem, block)),
    }
    if problem.mask_period:
        macros["MASK_PERIOD"] = problem.mask_period
    return macros


def mask_values(problem: Attention, state_rows: int) -> dict[str, int]:
    """Parameters that say where a mask's numbers and the states of its blocks lie; zeros without a mask."""
    if problem.mask is None:
        return dict.fromkeys(_PARAMS.split(", "), 0)
    _, heads = _distinct(problem.mask.view)
    return {
        **problem.strides("mask"),
        "state_batch": heads if problem.mask.strides[0] else 0,
        "state_head": 1 if heads > 1 else 0,
        "state_parts": ceil_div(problem.rows, state_rows),
    }


def mask_states(
    problem: Attention, lowering: Lowering, state_rows: int, block: int
) -> tuple[list[KernelCall], Argument]:
    """The state of each block of the mask, and the launch that finds it out unless an earlier layer's did.

    Args:
        problem: Whose mask; without states of it nothing is launched, and they are never read.
        lowering: Where the trace's tensors are.
        state_rows, block: Rows and positions of a block.

    Raises:
        OpRefusal: There are too many masks or rows.
    """
    if problem.mask is None or not has_states(problem, block):
        return [], problem.k.argument
    batch, heads = _distinct(problem.mask.view)
    parts, tiles = ceil_div(problem.rows, state_rows), ceil_div(problem.length, block)
    if batch * heads > _MAX_GRID or parts > _MAX_GRID:
        raise OpRefusal(f"given {batch * heads} masks of {problem.rows} rows, expected at most {_MAX_GRID} of each")
    content = ("mask states", problem.mask.view, state_rows, block)
    buffer, is_new = lowering.common_scratch(content, problem.mask.tensor.index, batch * heads * parts * tiles)
    if not is_new:
        return [], Argument(buffer)
    shape = (tiles, parts, batch * heads)
    launch = _launch(problem, lowering, problem.mask, Argument(buffer, writes=True), shape, state_rows, block)
    return [launch], Argument(buffer)


def _launch(
    problem: Attention,
    lowering: Lowering,
    mask: Operand,
    states: Argument,
    shape: tuple[int, int, int],
    state_rows: int,
    block: int,
) -> KernelCall:
    _, heads = _distinct(mask.view)
    values = {"rows": problem.rows, "length": problem.length, "heads": heads, **problem.strides("mask")}
    most = CHUNK_BYTES // mask.dtype.size
    chunk = most if mask.has_chunks(most) and block % most == 0 else 1
    chunks = state_rows * block // chunk
    side_by_side = _THREADS // (1 << (chunks - 1).bit_length()) if chunks <= _WARP else 1
    grid = (ceil_div(shape[0], side_by_side), *shape[1:])
    told = mask_macros(problem, block)
    macros = {name: told[name] for name in ("mask_t", "MASK_CLOSED")}
    macros |= {"STATE_ROWS": state_rows, "BLOCK": block, "CHUNK": chunk, "SIDE_BY_SIDE": side_by_side}
    launch = Launch(MASK_STATES, grid, values, macros, inputs={"mask": mask.argument}, outputs={"states": states})
    nbytes = shape[2] * problem.rows * problem.length * mask.dtype.size
    return KERNELS.launch_alone(launch, f"open blocks of {mask.tensor.name}", nbytes, lowering)


def _distinct(mask: View) -> tuple[int, int]:
    """How many masks there are along the batch and along the heads."""
    batch, heads = (n if stride else 1 for n, stride in zip(mask.shape[:2], mask.strides[:2], strict=True))
    return batch, heads
