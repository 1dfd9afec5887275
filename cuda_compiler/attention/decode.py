"""Attention of few rows over many positions, as in a decode step: clusters of blocks share the positions.

Queries, and keys and values that are written to a cache, may be computed by the kernel itself: it reads the cache while
the kernel ahead of it still runs, and nothing but this kernel writes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.attention.computed import FUNCTION_MACROS, Functions, functions_of, new_rows
from cuda_compiler.attention.mask import MASK_MACROS, MaskBlocks, mask_macros, mask_values
from cuda_compiler.attention.sizes import (
    MAX_ROWS,
    PIECE,
    SET,
    SIZE_MACROS,
    bindings,
    element_bytes,
    least_depth,
    operand_values,
    padded,
    piece_bytes,
    scale_bytes,
    size_macros,
    suits_warps,
)
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.launches_ahead import launches_ahead, leave_room
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import Computed, Scattered
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate
from npu_compiler.tensor.expr import Iota, Load, walk
from npu_compiler.tensor.trace import Scatter, TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["ATTENTION_DECODE", "CLUSTER", "DECODE_MACROS", "DECODE_PARAMS", "WARPS", "Division", "are_fresh_rows"]
__all__ += ["count_of_new", "divide", "division_macros", "is_kept", "launch_of", "loads_fresh", "lower_decode"]

WARPS = 8
"""Of a block."""

CLUSTER = 8
"""Blocks of a cluster, at the most."""

_MAX_PARTED_ROWS = 8  # of a query head, where clusters share the query heads of a head of keys and bytes decide
_MAX_TILES = 8192  # that a block lists

DECODE_MACROS = (
    f"{SIZE_MACROS} SOFT_CAP? OWN_ROWS K_ROW V_ROW BLOCK TILES WARPS DEPTH CLUSTER CLUSTERS RESULT_TILES ALONE ENOUGH "
    f"MASK_HEADS {MASK_MACROS} FRESH EARLY ELEMENT_BYTES SCALE_BYTES {FUNCTION_MACROS}"
)
DECODE_PARAMS = (
    "int k_batch, k_head, v_batch, v_head, mask_batch, mask_head, mask_row, mask_step, state_batch, state_head"
)

ATTENTION_DECODE = KernelTemplate(
    "attention_decode",
    params=DECODE_PARAMS,
    macros=f"{DECODE_MACROS} HURRIES HEAD_PARTS KEPT_T",
    inputs="fresh k v mask sinks? states partial",
    threads=32 * WARPS,
    shared_bytes=None,
    files=(
        "mask.cuh tensor_cores.cuh attention_blocks.cuh attention_common.cuh attention_warp.cuh "
        "attention_inputs.cuh barriers.cuh clusters.cuh attention_cluster.cuh attention_open.cuh attention_share.cuh"
    ),
    computed="fresh",
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="attention_decode"):
    """What decides how clusters share the positions.

    Attributes:
        piece_bytes: Shared memory of a multiprocessor for pieces.
        depth: Pieces that a warp has on their way, where one cluster works for a head.
        alone: Pieces for each warp that one cluster computes sooner than several would put their parts together.
        enough: Pieces for each warp of another cluster.
    """

    piece_bytes: int
    depth: int
    alone: int
    enough: int


@dataclass(frozen=True)
class Division:
    """How the work is divided.

    Attributes:
        problem: What is to be computed.
        costs: What decided it.
        block: Positions of a block of the mask.
        cluster: Blocks of threads of a cluster.
        clusters: Clusters that share the positions of a head of keys.
        depth: Pieces that a warp has on their way.
        parts: Groups that the query heads of a head of keys are divided into; each reads the keys.
        beside: Whether blocks of other launches find room beside these.
    """

    problem: Attention
    costs: _Costs
    block: int
    cluster: int
    clusters: int
    depth: int
    parts: int
    beside: bool = False

    @property
    def shared(self) -> int:
        """Query heads of a group."""
        return self.problem.shared // self.parts

    @property
    def tiles(self) -> int:
        """Groups of the whole problem."""
        return self.problem.batch * self.problem.groups * self.parts

    @property
    def rows(self) -> int:
        """Rows of a group."""
        return self.shared * self.problem.rows

    @property
    def results(self) -> int:
        """Results of a cluster that are kept, rounded up to whole slices, and what they are relative to."""
        chunks = self.rows * padded(self.problem.value_size) // 4
        return ceil_div(chunks, self.cluster) * self.cluster * 4 + self.cluster * self.rows * 2

    @property
    def shared_bytes(self) -> int:
        return self.depth * WARPS * piece_bytes(self.problem)


def loads_fresh(group: Group, position: int, operand: Operand) -> bool:
    """Whether the kernel computes an operand of attention itself: queries, or what is scattered into keys or values."""
    problem = group.problem
    if not isinstance(problem, Attention) or not _parts(problem):
        return False
    if isinstance(operand, Computed):
        return position == 0 and not operand.is_of_rows
    if not isinstance(operand, Scattered) or position not in (1, 2):
        return False
    made, tensor = operand.made, operand.tensor
    whole = operand.view.same_elements(tensor.view) and made.shape[2] <= MAX_ROWS
    return whole and are_fresh_rows(made, tensor)


def are_fresh_rows(produced: Group, tensor: TracedTensor) -> bool:
    """Whether a scatter replaces whole rows of a tensor, at positions that are the same for all heads."""
    return _is_of_rows(produced, tensor) and _names_rows(produced)


def _parts(problem: Attention) -> list[int]:
    """How many groups the query heads of a head of keys may make, so that each has few rows, the fewest first."""
    counts = range(1, problem.shared + 1)
    return [n for n in counts if problem.shared % n == 0 and problem.shared // n * problem.rows <= MAX_ROWS]


def _is_of_rows(produced: Group, tensor: TracedTensor) -> bool:
    """Whether a scatter replaces whole rows of all heads."""
    (batch, heads, _, size), strides = tensor.shape, tensor.layout.strides
    whole = produced.shape == (batch, heads, produced.shape[2], size) and produced.index_stride == strides[2]
    apart = View(produced.shape, (strides[0], strides[1], 0, strides[3]))
    return whole and produced.view.same_elements(apart) and produced.shape[2] > 0


def _names_rows(produced: Group) -> bool:
    """Whether a scatter's index is the same for all heads and all elements of a row."""
    assert produced.index is not None
    for node in walk(produced.index):
        view = node.view if isinstance(node, Iota) else node.ref.view if isinstance(node, Load) else None
        if view is not None:
            strides = view.expand(produced.shape).strides
            if any(strides[dim] and produced.shape[dim] > 1 for dim in (1, 3)):
                return False
    return True


def lower_decode(problem: Attention, around: AnchoredGroup, blocks: MaskBlocks) -> KernelCall | None:
    """One launch; None where the kernel does not suit.

    Args:
        problem: What is to be computed.
        around: The same, with its epilogue and what makes its operands: both keys and values, or neither.
        blocks: What each block of the mask does.
    """
    division, lowering = divide(problem, blocks.positions, around.device), around.lowering
    fresh = count_of_new(problem)
    if division is None or fresh is None:
        return None
    ahead = lowering.ask(launches_ahead, problem.k.tensor.index)
    if division.parts > 1 and leave_room(ahead):
        # the launches around have blocks on most multiprocessors as well, and leave room to each other
        division = replace(division, depth=least_depth(problem, division.rows), beside=True)
    early = blocks.ready and all(is_kept(operand, lowering) for operand in (problem.k, problem.v))
    # between products that stream, blocks of the next launch would crowd beside what is left of the one ahead
    hurries = early and not (ahead and ahead[-1].streams)
    kept = {"FRESH": fresh, "KEPT_T": "tile_t" if fresh else "const tile_t"}
    begins = {"EARLY": int(early), "HURRIES": int(hurries)}
    functions = functions_of(problem, lowering, one_place=False, packs=True)
    macros = {**division_macros(division), **kept, **begins, **functions.macros, "HEAD_PARTS": division.parts}
    caches = {"k": problem.k.argument, "v": problem.v.argument}
    launch = launch_of(ATTENTION_DECODE, division, functions, macros, caches, blocks, hurries, lowering)
    # that of stored operands, so that the bytes of keys and values count
    return around.of_problem(problem.stored()).launch(launch, around.pack_size(2))


def launch_of(
    template: KernelTemplate,
    division: Division,
    functions: Functions,
    macros: Mapping[str, object],
    caches: Mapping[str, Argument],
    blocks: MaskBlocks,
    hurries: bool,
    lowering: Lowering,
) -> EarlyLaunch:
    """The launch of a kernel of clusters that share positions.

    Args:
        template: The kernel.
        division: What each of its blocks does.
        functions: What it computes of its operands.
        macros: What is defined for it.
        caches: Where keys and values lie, and what belongs to them; with new rows the kernel writes there.
        blocks: What each block of the mask does.
        hurries: Whether it lets the next launch begin before it has waited itself.
        lowering: Where the trace's tensors are.
    """
    problem, tiles = division.problem, division.tiles
    results = tiles * division.clusters * division.results if division.clusters > 1 else 0
    inputs = bindings(problem, blocks.states, results * FLOAT32.size, lowering)
    del inputs["q"]
    inputs |= {name: replace(argument, writes=bool(count_of_new(problem))) for name, argument in caches.items()}
    return EarlyLaunch(
        template,
        grid=(division.clusters * division.cluster, 1, tiles),
        values=template.values_among(operand_values(problem, problem.rows)),
        macros=macros,
        inputs=inputs,
        flops=problem.flops,
        prologues={"fresh": functions.prologue},
        shared_bytes=division.shared_bytes,
        extension=cluster_along_x(division.cluster, division.beside),
        hurries=hurries,
    )


def count_of_new(problem: Attention) -> int | None:
    """Rows that are written to keys and to values; None where there are too many, or not the same for both."""
    keys, values = (new_rows(operand) for operand in (problem.k, problem.v))
    if keys is None and values is None:
        return 0
    counts = {0 if rows is None else rows[1].shape[2] for rows in (keys, values)}
    return counts.pop() if len(counts) == 1 and max(counts) <= MAX_ROWS else None


def divide(problem: Attention, block: int, device: DeviceModel, parted: bool = True) -> Division | None:
    """How the work is divided; None where the kernel does not suit.

    Args:
        problem: What is to be computed.
        block: Positions of a block of the mask.
        device: The device.
        parted: Whether clusters may share the query heads of a head of keys where one could have them all.
    """
    if not offers(device, CLUSTERS):
        return None
    fitting, tiles = _parts(problem), ceil_div(problem.length, block)
    if not fitting:
        return None
    costs, held, pieces = _Costs.of(device), cluster_cores(device)[CLUSTER], tiles * block // PIECE
    parts, groups = fitting[0], problem.batch * problem.groups
    is_short = pieces <= costs.depth * CLUSTER * WARPS  # latency, not bytes, is what such a launch takes
    if parts > 1 and problem.rows > _MAX_PARTED_ROWS and not is_short:
        return None
    if parted and is_short:
        shorter = (n for n in fitting if problem.shared // n * problem.rows <= SET and groups * n * CLUSTER <= held)
        parts = next(shorter, parts)
    rows = problem.shared // parts * problem.rows
    if not suits_warps(problem, rows) or tiles > _MAX_TILES:
        return None
    heads = groups * parts
    cluster = CLUSTER
    while cluster > 1 and (heads * cluster > 2 * held or cluster // 2 * WARPS >= pieces):
        cluster //= 2
    resident = costs.piece_bytes // (WARPS * piece_bytes(problem))
    most = max(1, held * min(resident, 2) // (heads * cluster))
    warps = cluster * WARPS
    clusters = 1 if pieces <= costs.alone * warps else min(most, ceil_div(pieces, costs.enough * warps))
    together = max(1, resident // ceil_div(heads * cluster, held))  # so that all blocks find room at once
    depth = min(costs.depth if clusters == 1 else 1, together)
    return Division(problem, costs, block, cluster, clusters, max(least_depth(problem, rows), depth), parts)


def is_kept(operand: Operand, lowering: Lowering, is_fresh: bool = False) -> bool:
    """Whether no kernel of the plan but this one writes an operand; `is_fresh` if that scatters into it."""
    source = operand.tensor.source
    if (is_fresh or isinstance(operand, Scattered)) and isinstance(source, Scatter):
        return lowering.tensors[source.into.tensor].source is None
    return source is None


def division_macros(division: Division) -> dict[str, object]:
    """What the kernel's file is told of sizes and of how the work is divided."""
    problem = division.problem
    warps = division.cluster * WARPS
    return {
        **size_macros(problem),
        "GROUPS": problem.groups * division.parts,
        "SHARED": division.shared,
        "OWN_ROWS": problem.rows,
        "K_ROW": problem.k.strides[2],
        "V_ROW": problem.v.strides[2],
        "BLOCK": division.block,
        "TILES": ceil_div(problem.length, division.block),
        "WARPS": WARPS,
        "DEPTH": division.depth,
        "ELEMENT_BYTES": element_bytes(problem),
        "SCALE_BYTES": scale_bytes(problem),
        "CLUSTER": division.cluster,
        "CLUSTERS": division.clusters,
        "RESULT_TILES": division.tiles,
        "ALONE": division.costs.alone * warps,
        "ENOUGH": division.costs.enough * warps,
        "MASK_HEADS": division.shared if mask_values(problem, problem.rows)["state_head"] else 1,
        **mask_macros(problem, division.block),
    }
