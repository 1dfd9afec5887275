"""Lowers a convolution of one tap of what another such convolution gives: one launch computes both, tile by tile.

The results of the first go from registers to the tensor cores again, beside being stored, if others read them. So the
second one reads nothing but its weights: where a residual network's block ends, the next one's first convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuda_compiler.anchors import anchor_epilogue
from cuda_compiler.artifact.extensions import TensorMap
from cuda_compiler.devices import brings_boxes
from cuda_compiler.dialect import CUDA
from cuda_compiler.epilogues import packs_by_element
from cuda_compiler.images.directions import BACKWARDS, DirectedGroup
from cuda_compiler.images.image_packing import is_packed_image, is_packed_weight
from cuda_compiler.packing import CHUNK_BYTES, PACK_SIZES, PackedLoad, is_plain, pack_size
from cuda_compiler.tiles.teams import TeamTiling, as_type
from cuda_compiler.tiles.tiling import TILING_MACROS
from cuda_compiler.tiles.wgmma import LINE, WARPGROUP_ROWS, warpgroup_product
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import pointer_macros
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument, traffic_of
from npu_compiler.lowering.positions import Positions, epilogue_positions
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.forms import Produced
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue
from npu_compiler.tensor.view import collapse

__all__ = ["CONV2D_BACK_TO_BACK", "back_to_back_microseconds", "loads_results", "lower_back_to_back"]
__all__ += ["memory_microseconds"]

_STAGE_BYTES, _BARRIER_BYTES = WARPGROUP_ROWS * LINE * 2, 16  # of a stage
_WARP_ROWS = 16
_TEAMS = 3  # warpgroups that take tiles in turns: as many as have registers for the sums of both convolutions
_MOST_COLUMNS = 128  # of the second one
_LEAST_TILES, _ENOUGH_STAGES = 2, 10  # in shared memory; more stages for more tiles were no quicker
_PLACES = 2  # of a team, for parts of the first results

CONV2D_BACK_TO_BACK = KernelTemplate(
    "conv2d_back_to_back",
    params=f"int {BACKWARDS}, rows",
    macros=(
        f"{TILING_MACROS} tile_t COMMON ADDED_COMMON MADE COLUMNS MADE_STORED STAGED MADE_PARAMETERS MADE_ARGUMENTS"
    ),
    inputs="image weight added_image added_weight read next_weight made results operands",
    computed="operands",
    files="tensor_cores.cuh warpgroups.cuh barriers.cuh ring.cuh copy_engine.cuh tile.cuh",
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="back_to_back"):
    """The constants of the kernel.

    Attributes:
        launch: Clocks from the end of the kernel ahead to the first tile, and from the last one to the end.
        tile: Clocks of a team for a tile, beside its results.
        result: Clocks of a team for a result.
        nbytes: Bytes of all multiprocessors a clock, of two launches as of one.
    """

    launch: float
    tile: float
    result: float
    nbytes: float


def loads_results(group: Group, position: int, operand: Operand, device: DeviceModel) -> bool:
    """Whether a convolution may multiply the results of another one where these are computed."""
    conv = group.problem
    if not isinstance(operand, Produced) or not isinstance(conv, Convolution) or not brings_boxes(device):
        return False
    made, first = operand.made, operand.made.problem
    if not isinstance(first, Convolution) or position != 0 or group.added is not None or group.index is not None:
        return False
    of_images = [first] if made.added is None else [first, made.added.problem]
    dtypes = {conv.weight.dtype, made.output.dtype, group.output.dtype}
    dtypes |= {each.dtype for part in of_images for each in part.operands}
    whole = conv.outputs % LINE == 0 and conv.outputs <= _MOST_COLUMNS and _is_pointwise(conv)
    return (
        len(dtypes) == 1
        and dtypes <= {FLOAT16, BFLOAT16}
        and whole
        and all(_multiplies_pixels(part) for part in of_images)
        and first.outputs % LINE == 0
        and _stages(conv, made, device) > 0
    )


def _is_pointwise(conv: Convolution) -> bool:
    """Whether each result reads the pixel at its own place, and the weight lies as kernels copy it."""
    windows = conv.windows
    alone = windows.kernel == windows.stride == (1, 1) and windows.padding == (0, 0) and conv.groups == 1
    return alone and conv.weight.is_constant and is_packed_weight(conv.weight)


def _multiplies_pixels(problem: Problem) -> bool:
    """Whether it is such a convolution of pixels that lie in memory, in whole lines."""
    if not isinstance(problem, Convolution) or not _is_pointwise(problem) or problem.channels % LINE:
        return False
    image = problem.image
    return is_packed_image(image, problem.channels) and image.offset * image.dtype.size % CHUNK_BYTES == 0


def _convolutions(made: Group) -> list[Convolution]:
    """Those whose sum is the first result."""
    parts = [made.problem, None if made.added is None else made.added.problem]
    return [part for part in parts if isinstance(part, Convolution)]


def _slices(made: Group) -> int:
    """Lines along the first common dimension."""
    return sum(part.channels // LINE for part in _convolutions(made))


def _weight_bytes(conv: Convolution, made: Group) -> int:
    return 2 * (_slices(made) * LINE + conv.outputs) * conv.channels


def _stages(conv: Convolution, made: Group, device: DeviceModel, staged: bool = True) -> int:
    """Stages of pixels in shared memory, beside all weights; 0 where they are too few for two tiles.

    Args:
        conv: The second convolution.
        made: The first one.
        device: Where both run.
        staged: Whether its epilogue reads something for each result.
    """
    tile = _slices(made) + staged * (conv.channels // LINE)
    left = device.shared_bytes - _weight_bytes(conv, made) - _place_bytes(conv, staged)
    most = max(_ENOUGH_STAGES, _LEAST_TILES * tile)
    tiles = min(left // (_STAGE_BYTES + _BARRIER_BYTES), most) // tile
    return tile * tiles if tiles >= _LEAST_TILES else 0


def _place_bytes(conv: Convolution, staged: bool, stored: bool = True) -> int:
    """Of results on their way to memory, beside those that lie where something was read for them."""
    places = conv.outputs // LINE + (_PLACES if stored and not staged else 0)
    return _TEAMS * places * _STAGE_BYTES


def back_to_back_microseconds(conv: Convolution, group: Group, lowering: Lowering) -> float:
    """What one launch for both takes: rounds of tiles that are bound by memory or by one team's turns."""
    assert isinstance(conv.image, Produced)
    device, first = lowering.device, conv.image.made.problem
    assert isinstance(first, Convolution)
    costs, tiles = _Costs.of(device), ceil_div(conv.pixels, WARPGROUP_ROWS)
    turn = costs.tile + WARPGROUP_ROWS * (first.outputs + conv.outputs) * costs.result
    rounds = ceil_div(tiles, device.cores * _TEAMS)
    turns = device.microseconds(rounds * turn)
    return device.microseconds(costs.launch) + max(turns, memory_microseconds(group, lowering))


def memory_microseconds(group: Group, lowering: Lowering) -> float:
    """What moving the tensors of a launch takes, where these are images that no cache holds."""
    device = lowering.device
    return device.microseconds(traffic_of(group, lowering.tensors) / _Costs.of(device).nbytes)


def lower_back_to_back(conv: Convolution, group: Group, lowering: Lowering) -> KernelCall | None:
    """One launch for a convolution and the one that makes its image; None where an epilogue takes no packs or no room.

    Raises:
        OpRefusal: A tensor that an epilogue reads is too large.
    """
    assert isinstance(conv.image, Produced)
    made, device = conv.image.made, lowering.device
    assert isinstance(made.problem, Convolution)
    work, inner = DirectedGroup.of(group, lowering), epilogue_positions(made, lowering, "sum", prefix="m")
    sizes = work.pack_size(width=conv.outputs), pack_size(made, inner.operands, made.problem.outputs)
    staged = packs_by_element(made, inner, PACK_SIZES[0])
    tiling = _tiling(conv, made, device, bool(staged))
    copied = len(staged) <= 1 and all(_is_staged(load, made, inner) for load in staged)
    if set(sizes) != {PACK_SIZES[0]} or not copied or tiling.stages == 0 or not _row_stride(made) * _row_stride(group):
        return None
    own, *others = _convolutions(made)
    tiles, dtype, stored = ceil_div(conv.pixels, WARPGROUP_ROWS), conv.weight.dtype.name, conv.image.stored
    shared_bytes = _weight_bytes(conv, made) + _place_bytes(conv, bool(staged), stored)
    shared_bytes += tiling.stages * (_STAGE_BYTES + _BARRIER_BYTES)
    macros = {
        **tiling.macros(tiles, _slices(made)),
        "SHARED_BYTES": shared_bytes,
        "tile_t": CUDA.storage[dtype],
        "COMMON": own.channels,
        "ADDED_COMMON": sum(part.channels for part in others),
        "MADE": own.outputs,
        "COLUMNS": conv.outputs,
        "MADE_STORED": int(stored),
        "STAGED": len(staged),
    }
    launch = Launch(
        CONV2D_BACK_TO_BACK,
        grid=(tiling.grid(tiles, device), 1, 1),
        values={BACKWARDS: work.backwards, "rows": conv.pixels},
        macros=macros,
        inputs=_inputs(conv, work, inner, staged),
        flops=conv.flops + sum(part.flops for part in (own, *others)),
        text=f"{tiling.functions(dtype)}\n{_product_of_kept(conv)}",
        prologues={"operands": _made_epilogue(made, inner)},
        block=(tiling.threads, 1, 1),
        shared_bytes=shared_bytes,
    )
    return work.directed_with(launch, tiling.epilogue(anchor_epilogue(group, work.found, PACK_SIZES[0], gives=True)))


def _inputs(
    conv: Convolution, work: DirectedGroup, inner: Positions, staged: Sequence[PackedLoad]
) -> dict[str, Argument]:
    """What the kernel binds: addresses of weights, and how the copy engine sees the rest."""
    assert isinstance(conv.image, Produced)
    made = conv.image.made
    own, *others = _convolutions(made)
    image = _pixels(own.image.argument, own.pixels, own.channels, own.channels, made)
    inputs = {
        **dict.fromkeys(("image", "added_image", "read", "made"), image),  # where the kernel needs none
        **dict.fromkeys(("weight", "added_weight"), own.weight.argument),
        "next_weight": conv.weight.argument,
        "results": _written(work.group, conv),
    }
    for part in others:
        inputs["added_image"] = _pixels(part.image.argument, part.pixels, part.channels, part.channels, made)
        inputs["added_weight"] = part.weight.argument
    for load in staged:
        view, stride = load.leaf.ref.view, inner.operands.walks[load.leaf][-2]
        argument = Argument(load.leaf.ref.tensor, view.offset * load.leaf.dtype.size)
        inputs["read"] = _pixels(argument, own.pixels, own.outputs, stride, made)
    if conv.image.stored:
        inputs["made"] = _written(made, own)
    return inputs


def _pixels(argument: Argument, pixels: int, channels: int, stride: int, made: Group) -> Argument:
    """How the copy engine sees an image: 64 pixels of 64 channels at a time, `stride` elements apart."""
    return _boxes(argument, (channels, pixels), stride, WARPGROUP_ROWS, made.output.dtype)


def _written(group: Group, conv: Convolution) -> Argument:
    """How it sees results: 16 pixels of 64 channels at a time, which a warp has."""
    sizes = conv.outputs, conv.pixels
    return _boxes(output_argument(group), sizes, _row_stride(group), _WARP_ROWS, group.output.dtype)


def _row_stride(group: Group) -> int:
    """Elements from the results of a pixel to those of the next one; 0 where that differs."""
    assert group.problem is not None
    _, rows, _ = group.problem.dims
    shape, strides = (tuple(each[dim] for dim in rows) for each in (group.view.shape, group.view.strides))
    sizes, (walk,) = collapse(shape, [strides])
    return walk[0] if len(sizes) == 1 else 0


def _boxes(argument: Argument, sizes: tuple[int, int], stride: int, rows: int, dtype: DType) -> Argument:
    return replace(argument, extension=TensorMap(dtype, sizes, (stride * dtype.size,), (LINE, rows)))


def _tiling(conv: Convolution, made: Group, device: DeviceModel, staged: bool) -> TeamTiling:
    """How the first results are cut into what a team has at a time."""
    stages = _stages(conv, made, device, staged)
    return TeamTiling(WARPGROUP_ROWS, LINE, LINE, 4, 1, stages, blocks=1, teams=_TEAMS)


def _product_of_kept(conv: Convolution) -> str:
    """The function that multiplies results by the second weight."""
    return warpgroup_product(conv.outputs, conv.weight.dtype.name, "multiply_kept_rows", a_in_registers=True)


def _is_staged(load: PackedLoad, made: Group, found: Positions) -> bool:
    """Whether what an epilogue reads can be copied ahead, as the pixels are."""
    is_matrix = not found.statements and found.operands.walks[load.leaf][-2] > 0
    return is_plain(load) and load.leaf.dtype == made.output.dtype and is_matrix


def _made_epilogue(made: Group, found: Positions) -> Prologue:
    """What becomes of the first results, on their way to the second product."""
    fused = as_type("MadeEpilogue", anchor_epilogue(made, found, PACK_SIZES[0], gives=True))
    macros = pointer_macros("MADE", found.operands, CUDA)
    return Prologue((found.operands,), found.values, macros, fused.text, flops=fused.flops)
