"""Lowers convolutions: products of matrices on tensor cores, or one result a thread where channels are few."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from cuda_compiler.artifact.vocabulary import WARPGROUPS, stricter
from cuda_compiler.dialect import CUDA
from cuda_compiler.images.back_to_back import back_to_back_microseconds, lower_back_to_back, memory_microseconds
from cuda_compiler.images.depthwise import depthwise_pack, lower_depthwise
from cuda_compiler.images.directions import BACKWARDS, DirectedGroup
from cuda_compiler.images.image_packing import (
    TAP_MACROS,
    along_axes,
    is_packed_image,
    is_packed_weight,
    pack_image,
    packed_weight,
)
from cuda_compiler.images.overlaps import fits_overlaps, lower_overlaps
from cuda_compiler.images.windows import fits_windows, lower_windows
from cuda_compiler.packing import CHUNK, CHUNK_BYTES
from cuda_compiler.short_codes import operations_on_codes
from cuda_compiler.tiles.lowering import (
    bytes_of_a_result,
    close_tilings,
    partial_argument,
    tiles_microseconds,
)
from cuda_compiler.tiles.tiling import TILE_MACROS, Asked, Tiling, with_codes
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall, Step, choice_of, options_of
from npu_compiler.dtypes import BFLOAT16, FLOAT16, INT8, UINT8
from npu_compiler.integers import ceil_div
from npu_compiler.ir import TensorSpec
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.forms import Produced
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Added, Problem
from npu_compiler.lowering.problems.windows import image_values
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["CONV2D", "CONV2D_PLAIN", "loads_convolution", "lower_conv2d", "multiplies_codes"]

_FEW_OUTPUTS = 8  # in a group: fewer waste most of a tile
_UNIT_BYTES = 2  # of what tiles count: an element, or two codes of a byte
_PLAIN_THREADS = 128
_PAIRS = {INT8: "CodePair", UINT8: "UnsignedPair"}  # of codes of an image, in kernels

CONV2D = KernelTemplate(
    "conv2d",
    params=f"int {BACKWARDS}, rows, tiles_m",
    macros=f"{TILE_MACROS} ADDED tile_t A_ALONG_K B_ALONG_K B_CONSTANT COLUMNS OUT_HEIGHT OUT_WIDTH OUTSIDE?",
    inputs="image weight added_image? added_weight? partial",
    shared_bytes=None,
)
CONV2D_PLAIN = KernelTemplate(
    "conv2d_plain",
    params=(
        "int height, width, out_height, out_width, image_stride, y_stride, x_stride, channel_stride, results, "
        "outputs, group_outputs, w_output, w_channel, w_y, w_x"
    ),
    macros=f"a_t b_t {TAP_MACROS} CHANNELS",
    inputs="image weight",
    threads=_PLAIN_THREADS,
)


@lowering_of(Convolution)
def lower_conv2d(conv: Convolution, group: Group, lowering: Lowering) -> list[Step]:
    """One launch, chosen by the device, and one before it where the image's channels must be packed.

    Raises:
        OpRefusal: A tensor that the epilogue reads, or the packed image, is too large.
    """
    if isinstance(conv.image, Produced):
        return _lower_both(conv, conv.image, group, lowering)
    work = DirectedGroup.of(group, lowering)
    together = depthwise_pack(conv, work)
    if together > 1:
        return [lower_depthwise(conv, together, work)]
    if not _fits_tiles(conv):
        return [_lower_plain(conv, work)]
    if is_packed_image(conv.image, conv.channels) and conv.image.offset * conv.image.dtype.size % CHUNK_BYTES == 0:
        return choice_of(_tiled_options(conv, work, conv.image.argument, _geometry(conv)))
    packing, packed, geometry = pack_image(conv.image, _geometry(conv), lowering)
    tiled = _tiled_options(conv, work, packed, geometry)
    if not fits_windows(conv, work):
        return [packing, *choice_of(tiled)]
    packed_ways = (CallOption(way.requires, (packing, *way.calls)) for way in tiled)
    return choice_of([CallOption(WARPGROUPS, (lower_windows(conv, work),)), *packed_ways])


def _lower_both(conv: Convolution, image: Produced, group: Group, lowering: Lowering) -> list[Step]:
    """A convolution and the one that makes its image: one launch where that is quicker, else two."""
    made, behind = image.apart(group)
    alone = behind.problem
    assert isinstance(made.problem, Convolution)
    assert isinstance(alone, Convolution)
    apart = _microseconds(made.problem, made, lowering) + _microseconds(alone, behind, lowering)
    is_quicker = back_to_back_microseconds(conv, group, lowering) < apart
    joined = lower_back_to_back(conv, group, lowering) if is_quicker else None
    first, last = lower_conv2d(made.problem, made, lowering), lower_conv2d(alone, behind, lowering)
    if joined is None:
        return [*first, *last]
    return choice_of([CallOption(WARPGROUPS, (joined,)), *_ways(first[-1], last[-1])])


def _ways(first: Step, last: Step) -> list[CallOption]:
    """Ways to do both of two steps: the preferred ones, each other one beside these, and those for any device."""
    firsts, lasts = options_of(first), options_of(last)
    pairs = [(firsts[0], lasts[0]), *((a, lasts[0]) for a in firsts[1:]), *((firsts[0], b) for b in lasts[1:])]
    pairs.append((firsts[-1], lasts[-1]))
    return [CallOption(stricter(a.requires, b.requires), (*a.calls, *b.calls)) for a, b in dict.fromkeys(pairs)]


def _microseconds(conv: Convolution, group: Group, lowering: Lowering) -> float:
    """What the tiles of a convolution take, by the models of their cost, and its tensors at the least."""
    tiles = tiles_microseconds(_asked(conv, group, lowering), lowering.device, True)
    return max(tiles, memory_microseconds(group, lowering))


def loads_convolution(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is another convolution whose result can be added to that of a group's before its epilogue."""
    return isinstance(operand, Added) and _reads_chunks(group.problem) and _reads_chunks(operand.problem)


def _reads_chunks(problem: Problem | None) -> bool:
    """Whether it is a convolution, without groups, that takes its operands to tensor cores as they are."""
    if not isinstance(problem, Convolution) or problem.result.dtype not in (FLOAT16, BFLOAT16):
        return False
    whole = problem.groups == 1 and problem.outputs >= _FEW_OUTPUTS
    return whole and is_packed_weight(problem.weight) and is_packed_image(problem.image, problem.channels)


def multiplies_codes(weight: TensorSpec, groups: int) -> bool:
    """As `CodegenTarget.multiplies_codes`: channels come in whole chunks."""
    return groups == 1 and weight.shape[1] % CHUNK_BYTES == 0 and weight.shape[0] >= _FEW_OUTPUTS


def _fits_tiles(conv: Convolution) -> bool:
    """Whether tensor cores can do it without most of a tile lying idle."""
    if _is_coded(conv):
        return True
    half = conv.image.dtype == conv.weight.dtype and conv.image.dtype in (FLOAT16, BFLOAT16)
    whole_chunks = conv.groups == 1 or conv.channels % CHUNK == 0
    return half and whole_chunks and conv.outputs >= _FEW_OUTPUTS and is_packed_weight(conv.weight)


def _is_coded(conv: Convolution) -> bool:
    """Whether codes of bytes are multiplied; elsewhere the image and the filter are numbers of 16 bits."""
    return conv.weight.dtype == INT8 and conv.image.dtype in _PAIRS


def _summed(conv: Convolution, group: Group) -> list[Convolution]:
    """The group's convolution, and the one that is added to it, if any."""
    added = None if group.added is None else group.added.problem
    return [conv, added] if isinstance(added, Convolution) else [conv]


def _depth(conv: Convolution) -> int:
    """Extent of the common dimension, its taps filled up, in what tiles count."""
    return prod(packed_weight(conv.weight.shape)[1:]) * conv.weight.dtype.size // _UNIT_BYTES


def _geometry(conv: Convolution) -> dict[str, int]:
    """What the kernels know of the image and of the taps when they are compiled."""
    _, channels, taps_y, taps_x = packed_weight(conv.weight.shape)
    windows = conv.windows
    return {
        **along_axes(STEP=windows.stride, PAD=windows.padding, DILATION=windows.dilation, TAPS=(taps_y, taps_x)),
        "CHANNELS": channels,
        "PIXEL_STRIDE": channels * conv.groups,
        "HEIGHT": conv.image.shape[2],
        "WIDTH": conv.image.shape[3],
    }


def _in_units(geometry: Mapping[str, int]) -> dict[str, int]:
    """The geometry of an image of codes, its channels counted in pairs."""
    return {**geometry, **{key: geometry[key] // _UNIT_BYTES for key in ("CHANNELS", "PIXEL_STRIDE")}}


def _struct(name: str, geometry: Mapping[str, int]) -> str:
    """A type that holds a geometry's numbers."""
    numbers = ", ".join(f"{key} = {value}" for key, value in geometry.items())
    return f"struct {name} {{\n    static constexpr int {numbers};\n}};"


def _asked(conv: Convolution, group: Group, lowering: Lowering) -> Asked:
    """What is asked of tiles."""
    depth = sum(map(_depth, _summed(conv, group)))
    moved, operations = bytes_of_a_result(conv, group, lowering), operations_on_codes(group)
    return Asked(conv.pixels, conv.outputs, depth, conv.groups, moved, operations)


def _tiled_options(
    conv: Convolution, work: DirectedGroup, image: Argument, geometry: Mapping[str, int]
) -> list[CallOption]:
    group = work.group
    if _is_coded(conv):
        geometry = _in_units(geometry)
    # Windows of one chunk overlap and come through the level-1 cache, which large tiles would leave no room for.
    large = geometry["CHANNELS"] != CHUNK
    tilings = close_tilings(_asked(conv, group, work.lowering), work.device, large)
    added = _summed(conv, group)[1:]
    structs = [_struct("Image", geometry), *(_struct("AddedImage", _geometry(part)) for part in added)]
    ways = [
        CallOption(tiling.requires, (_lower_tiled(conv, work, image, "\n".join(structs), tiling),))
        for tiling in tilings
    ]
    if not _is_coded(conv) and fits_overlaps(conv, work):
        ways.insert(0, CallOption(WARPGROUPS, (lower_overlaps(conv, work),)))
    return ways


def _lower_tiled(conv: Convolution, work: DirectedGroup, image: Argument, structs: str, tiling: Tiling) -> KernelCall:
    lowering, summed = work.lowering, _summed(conv, work.group)
    steps = sum(ceil_div(_depth(part), tiling.depth) for part in summed)
    tiles_m, tiles_n = ceil_div(conv.pixels, tiling.rows), ceil_div(conv.outputs, tiling.columns)
    tiles = tiles_m * tiles_n * conv.groups
    macros = {
        **tiling.macros(tiles, steps, tiling.panel(tiles_m, tiles_n, lowering.device)),
        "ADDED": len(summed) - 1,
        "tile_t": _PAIRS[conv.image.dtype] if _is_coded(conv) else CUDA.storage[conv.image.dtype.name],
        "A_ALONG_K": 1,
        "B_ALONG_K": 1,
        "B_CONSTANT": int(conv.weight.is_constant),
        "COLUMNS": conv.outputs,
        "OUT_HEIGHT": conv.shape[2],
        "OUT_WIDTH": conv.shape[3],
    }
    if conv.outside:
        macros["OUTSIDE"] = conv.outside
    weight = conv.weight.argument
    inputs = {"image": image, "weight": weight}
    for part in summed[1:]:
        inputs |= {"added_image": part.image.argument, "added_weight": part.weight.argument}
    launch = Launch(
        CONV2D,
        grid=(tiling.grid(tiles, lowering.device), tiling.splits, 1),
        values={BACKWARDS: work.backwards, "rows": conv.pixels, "tiles_m": tiles_m},
        macros=macros,
        inputs={**inputs, "partial": partial_argument(tiling, tiles, weight, lowering)},
        flops=sum(part.flops for part in summed),
        text=f"{structs}\n{tiling.functions(conv.image.dtype.name)}",
        files=with_codes(tiling.files) if _is_coded(conv) else tiling.files,
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
    )
    size = work.pack_size(tiling.neighbours(work.group.output.dtype), conv.outputs)
    return work.directed_with(launch, tiling.epilogue(work.epilogue(size)))


def _lower_plain(conv: Convolution, work: DirectedGroup) -> KernelCall:
    values = {
        **image_values(conv.image, conv.shape),
        "results": prod(conv.shape),
        "outputs": conv.shape[1],
        "group_outputs": conv.outputs,
        **conv.weight.named_strides("w", ("output", "channel", "y", "x")),
    }
    windows = conv.windows
    macros = {
        **along_axes(STEP=windows.stride, PAD=windows.padding, DILATION=windows.dilation, TAPS=windows.kernel),
        "CHANNELS": conv.channels,
        "a_t": CUDA.storage[conv.image.dtype.name],
        "b_t": CUDA.storage[conv.weight.dtype.name],
    }
    launch = Launch(
        CONV2D_PLAIN,
        grid=(ceil_div(prod(conv.shape), _PLAIN_THREADS), 1, 1),
        values=values,
        macros=macros,
        inputs=conv.arguments,
        flops=conv.flops,
    )
    return work.launch(launch, 1)
