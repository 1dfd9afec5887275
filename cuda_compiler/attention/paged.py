"""Attention of few rows over keys and values in pages, as in a decode step of many texts: parts of so many positions.

However long each text is, a block of threads has a part of it, so that all finish together. Queries may be computed by
the kernel itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.artifact.vocabulary import architecture
from cuda_compiler.attention.mask import MASK_MACROS, MaskBlocks, mask_macros, mask_values
from cuda_compiler.attention.pages import PAGE_MACROS, pages
from cuda_compiler.attention.sizes import SIZE_MACROS, bindings, operand_values, padded, size_macros
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch, is_settled
from cuda_compiler.packing import pack_size
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import pointer_arguments, pointer_parameters
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.element import element_function
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import Computed, Paged
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Prologue
from npu_compiler.tensor.expr import Expr, Load, leaves

__all__ = ["ATTENTION_PAGED", "PAGED", "loads_pages", "lower_paged", "suits_fresh"]

PAGED = architecture(80)  # copies in the background, products of either half precision
_MAX_ROWS = 16
_MAX_WIDTH = 256  # sums of eight rows that a warp holds, over the sets of eight rows
_CHUNK = 8  # elements of 16 bytes, in which rows are copied
_PIECE = 16  # positions, as in attention_warp.cuh
_ROW_GAP = 8  # elements between rows in shared memory
_PART_STEP = 64  # positions that a part has a multiple of
_SHORT_PART = 128
_MAX_PART = 512
_MAX_PARTS = 64
_MAX_TOKENS = 1024  # whose places each block of threads looks at, where it writes new keys and values itself

ATTENTION_PAGED = KernelTemplate(
    "attention_paged",
    params=(
        "int rows, k_batch, k_head, v_batch, v_head, mask_batch, mask_head, mask_row, mask_step, state_batch, "
        "state_head"
    ),
    macros=(
        f"{SIZE_MACROS} SOFT_CAP? OWN_ROWS K_ROW V_ROW BLOCK PART PARTS WARPS DEPTH RESULT_TILES MASK_HEADS "
        f"{MASK_MACROS} EARLY FRESH KEPT_T OPERAND_PARAMETERS OPERAND_ARGUMENTS {PAGE_MACROS}"
    ),
    inputs="queries k v mask sinks? states partial pages",
    threads=lambda macros: 32 * macros["WARPS"],
    shared_bytes=None,
    files="mask.cuh tensor_cores.cuh attention_blocks.cuh attention_common.cuh attention_warp.cuh",
    computed="queries pages",
)


def loads_pages(group: Group, position: int, operand: Operand) -> bool:
    """Whether the kernels for attention read keys or values in pages of this size: a block of positions lies in one."""
    problem = group.problem
    if not isinstance(operand, Paged) or not isinstance(problem, Attention):
        return False
    if operand.fresh is not None and not suits_fresh(problem.with_operand(position, operand)):
        return False
    return operand.page % _PART_STEP == 0 and operand.page & (operand.page - 1) == 0


def lower_paged(
    problem: Attention, group: Group, lowering: Lowering, positions: Positions, blocks: MaskBlocks
) -> KernelCall | None:
    """One launch; None where keys and values lie in no pages, or the kernel does not suit.

    Args:
        problem: What is to be computed.
        group: The same, with its epilogue and what makes its queries.
        lowering: Where the trace's tensors are.
        positions: The operands of the epilogue.
        blocks: What each block of the mask does.
    """
    if not isinstance(problem.k, Paged) or not _suits(problem, blocks.positions):
        return None
    division, fresh = _divide(problem, lowering.device), _fresh(problem)
    parts, tiles = ceil_div(problem.length, division.part), problem.batch * problem.groups
    row_floats = padded(problem.value_size) + 2
    kept = tiles * parts * problem.shared * problem.rows * row_floats * FLOAT32.size if parts > 1 else 0
    inputs = bindings(problem, blocks.states, kept, lowering)
    del inputs["q"]
    caches = {name: replace(inputs[name], writes=bool(fresh)) for name in ("k", "v")}
    early = blocks.ready and (not fresh or _is_settled(problem, lowering))
    launch = EarlyLaunch(
        ATTENTION_PAGED,
        grid=(parts, 1, tiles),
        values=ATTENTION_PAGED.values_among(operand_values(problem, problem.rows)),
        macros={
            **size_macros(problem),
            "OWN_ROWS": problem.rows,
            "K_ROW": problem.k.strides[2],
            "V_ROW": problem.v.strides[2],
            "BLOCK": blocks.positions,
            "PART": division.part,
            "PARTS": parts,
            "WARPS": division.warps,
            "DEPTH": division.depth,
            "RESULT_TILES": tiles,
            "MASK_HEADS": problem.shared if mask_values(problem, problem.rows)["state_head"] else 1,
            **mask_macros(problem, blocks.positions),
            "EARLY": int(early),
            "FRESH": problem.rows if fresh else 0,
            "KEPT_T": "tile_t" if fresh else "const tile_t",
        },
        inputs={**inputs, **caches},
        flops=problem.flops,
        prologues={"queries": _computed(problem, lowering), **pages(problem, lowering)},
        shared_bytes=division.warps * division.depth * _piece_bytes(problem),
        hurries=early,
    )
    reading = replace(group, problem=problem.with_operand(0, problem.q.in_memory))
    size = min(2, pack_size(group, positions.operands, group.shape[-1]))
    return anchor_launch(launch, anchor_epilogue(reading, positions, size), lowering)


def _suits(problem: Attention, block: int) -> bool:
    rows = problem.shared * problem.rows
    fits = rows <= _MAX_ROWS and ceil_div(rows, 8) * padded(problem.value_size) <= _MAX_WIDTH
    copied = problem.k.has_chunks(_CHUNK) and problem.v.has_chunks(_CHUNK)
    return fits and copied and not problem.causal and _PART_STEP % block == 0


@dataclass(frozen=True)
class _Division:
    """How the work is divided.

    Attributes:
        warps: Of a block of threads.
        depth: Pieces that a warp has on their way.
        part: Positions of a block of threads.
    """

    warps: int
    depth: int
    part: int


def _divide(problem: Attention, device: DeviceModel) -> _Division:
    """The division for texts that fill half of their pages, as found by trial on one H200.

    Where they leave multiprocessors idle all the same, each warp has one piece. Else parts are as long as keeps two
    blocks of threads on each, with more pieces on their way than where more blocks than that wait for their turn.
    """
    half = problem.batch * problem.groups * ceil_div(problem.length, 2)
    if half // _SHORT_PART <= device.cores:
        return _Division(8, 1, _longer(problem, _SHORT_PART))
    part = _PART_STEP
    while part < _MAX_PART and half // part > 2 * device.cores:
        part *= 2
    return _Division(4, 3 if half // part <= 2 * device.cores else 2, _longer(problem, part))


def _longer(problem: Attention, part: int) -> int:
    """So many positions, or more where there would be too many parts to put together."""
    while ceil_div(problem.length, part) > _MAX_PARTS and part < 16 * _PART_STEP:
        part *= 2
    return part


def _piece_bytes(problem: Attention) -> int:
    """Shared memory for one piece of a warp."""
    return _PIECE * (padded(problem.size) + padded(problem.value_size) + 2 * _ROW_GAP) * 2


def suits_fresh(problem: Attention) -> bool:
    """Whether the kernel stores what is new among keys and values: as many rows of each lane as it has queries."""
    fresh = _fresh(problem)
    if problem.shared * problem.rows > _MAX_ROWS or problem.causal or problem.batch * problem.rows > _MAX_TOKENS:
        return False
    copied = problem.k.has_chunks(_CHUNK) and problem.v.has_chunks(_CHUNK)
    return copied and all(rows.shape[0] == problem.batch * problem.rows for rows in fresh)


def _fresh(problem: Attention) -> list[Group]:
    """New keys and new values."""
    operands = (operand for operand in (problem.k, problem.v) if isinstance(operand, Paged))
    return [operand.fresh for operand in operands if operand.fresh is not None]


def _is_settled(problem: Attention, lowering: Lowering) -> bool:
    """Whether the pools are the kernel's alone to write, and tables and places are there before the launch ahead."""
    looked_up: list[Expr] = []
    for operand in (problem.k, problem.v):
        assert isinstance(operand, Paged)
        assert operand.fresh is not None
        assert operand.fresh.index is not None
        looked_up += [operand.table, operand.fresh.index]
    read = {load.ref.tensor for expr in looked_up for load in leaves(expr)}
    return all(lowering.tensors[index].source is None or lowering.ask(is_settled, index) for index in read)


def _computed(problem: Attention, lowering: Lowering) -> Prologue:
    """A function ``query_value`` that gives an element of the queries, from memory or computed.

    With new keys and values ``key_value`` and ``value_value`` give theirs, by token, head and column, and
    ``fresh_place`` where a token's go: pages and places in one number, or -1.
    """
    q = problem.q
    wanted = {"query_value": (q.expr if isinstance(q, Computed) else Load(q.ref, q.dtype), q.shape)}
    fresh = _fresh(problem)
    if fresh:
        keys, values = fresh
        assert keys.index is not None
        wanted |= {"key_value": (keys.expr, keys.shape), "value_value": (values.expr, values.shape)}
        wanted["fresh_place"] = (keys.index, keys.shape)
    made = [
        element_function(name, expr, shape, lowering.tensors, f"f{number}", CUDA)
        for number, (name, (expr, shape)) in enumerate(wanted.items())
    ]
    pointers = "".join(pointer_parameters(function.operands, CUDA) for function in made)
    macros: dict[str, object] = {
        "OPERAND_PARAMETERS": pointers,
        "OPERAND_ARGUMENTS": "".join(pointer_arguments(function.operands) for function in made),
    }
    values_of = {name: value for function in made for name, value in function.operands.fields}
    text = "\n".join(function.text(pointers, CUDA) for function in made)
    return Prologue(tuple(function.operands for function in made), values_of, macros, text)
