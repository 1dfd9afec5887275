"""Lowers pooling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.devices import busy_threads
from cuda_compiler.dialect import CUDA
from cuda_compiler.images.convolution import lower_conv2d
from cuda_compiler.images.directions import BACKWARDS, DirectedGroup
from cuda_compiler.images.image_packing import SIZE_MACROS, TAP_MACROS, along_axes, image_macros
from cuda_compiler.images.pooled_windows import lower_pooled_windows
from cuda_compiler.packing import PACK_SIZES
from npu_compiler.artifact.plan import CallOption, KernelCall, Step, choice_of, options_of
from npu_compiler.dtypes import BFLOAT16, FLOAT16, INT8, UINT8
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.forms import Produced
from npu_compiler.lowering.problems.operand import are_chunks
from npu_compiler.lowering.problems.pooling import Pooling
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["POOL2D", "lower_pool2d"]

_THREADS = 128
POOL2D = KernelTemplate(
    "pool2d",
    params=f"int {BACKWARDS}, groups",
    macros=(
        "a_t PACKS ALONG_Y ALONG_X UNROLL_Y UNROLL_X MAXIMUM ADAPTIVE DIVISOR PAIR_TYPE? CODES_FROM? "
        f"{TAP_MACROS} {SIZE_MACROS} IMAGE_STRIDE CHANNEL_STRIDE Y_STRIDE X_STRIDE"
    ),
    inputs="image",
    threads=_THREADS,
    files="byte_packs.cuh pixel_groups.cuh",
)
_PAIR_TYPES = {FLOAT16: '"f16x2"', BFLOAT16: '"bf16x2"'}
_MAX_UNROLLED = 64  # pixels that a thread's unrolled loops read


@lowering_of(Pooling)
def lower_pool2d(pool: Pooling, group: Group, lowering: Lowering) -> list[Step]:
    """One launch; where the image is what a convolution gives, one that computes both, or two.

    Raises:
        OpRefusal: A tensor is too large.
    """
    if not isinstance(pool.image, Produced):
        return [_lower_alone(pool, group, lowering)]
    made, behind = pool.image.apart(group)
    assert isinstance(made.problem, Convolution)
    assert isinstance(behind.problem, Pooling)
    last = _lower_alone(behind.problem, behind, lowering)
    apart = [*lower_conv2d(made.problem, made, lowering), last]
    joined = lower_pooled_windows(pool, group, lowering)
    return apart if joined is None else choice_of([CallOption(WARPGROUPS, (joined,)), *_ways(apart)])


def _ways(steps: Sequence[Step]) -> list[CallOption]:
    """The ways to do steps one after another, of which one at most is a choice."""
    ways = [CallOption("", ())]
    for step in steps:
        options = options_of(step)
        ways = [CallOption(a.requires or b.requires, (*a.calls, *b.calls)) for a in ways for b in options]
    return ways


def _lower_alone(pool: Pooling, group: Group, lowering: Lowering) -> KernelCall:
    """One thread a pack of channels of one or several output pixels."""
    image = pool.image
    work = DirectedGroup.of(group, lowering)
    size = _pack_size(pool, work)
    along_y, along_x = _along(pool, size, work.device)
    batch, channels, out_height, out_width = pool.shape
    groups, packs = batch * ceil_div(out_height, along_y) * ceil_div(out_width, along_x), channels // size
    macros = {
        **_geometry(pool),
        "a_t": CUDA.storage[image.dtype.name],
        "PACKS": packs,
        "ALONG_Y": along_y,
        "ALONG_X": along_x,
        "MAXIMUM": int(pool.maximum),
        "ADAPTIVE": int(pool.adaptive),
        "DIVISOR": pool.divisor.value,
    }
    if pool.maximum and image.dtype in (INT8, UINT8) and size % 4 == 0:
        macros["CODES_FROM"] = 0 if image.dtype == UINT8 else -128
    if pool.maximum and image.dtype in _PAIR_TYPES and size > 1:
        macros["PAIR_TYPE"] = _PAIR_TYPES[image.dtype]
    launch = Launch(
        POOL2D,
        grid=(ceil_div(groups * packs, _THREADS), 1, 1),
        values={BACKWARDS: work.backwards, "groups": groups},
        macros=macros,
        inputs=pool.arguments,
        flops=pool.flops,
    )
    return work.directed(launch, size)


def _along(pool: Pooling, size: int, device: DeviceModel) -> tuple[int, int]:
    """Output pixels of a thread along y and x: two where windows overlap and there is work for all threads."""
    windows = pool.windows
    overlapping = not pool.adaptive and windows.kernel[0] > windows.stride[0]
    enough = prod(pool.shape) // size >= 2 * busy_threads(device, "pooling")
    return (2, 1) if overlapping and enough and windows.span(0, 2) * windows.span(1, 1) <= _MAX_UNROLLED else (1, 1)


def _geometry(pool: Pooling) -> dict[str, object]:
    """What the kernel knows of the image and of the sliding window, which an adaptive pooling does not ask for."""
    windows = pool.windows
    unrolled = not pool.adaptive and windows.span(0, 2) * windows.span(1, 1) <= _MAX_UNROLLED
    return {
        **along_axes(TAPS=windows.kernel, STEP=windows.stride, PAD=windows.padding, DILATION=windows.dilation),
        "UNROLL_Y": _MAX_UNROLLED if unrolled else 1,
        "UNROLL_X": _MAX_UNROLLED if unrolled else 4,
        **image_macros(pool.image, pool.shape),
    }


def _pack_size(pool: Pooling, work: DirectedGroup) -> int:
    """Channels of a thread: those that the epilogue stores together, where the image can be read that way too."""
    size = work.pack_size(width=pool.shape[1])
    fits = are_chunks(size, pool.image.strides[1], pool.image.across(1))
    return size if size in PACK_SIZES and fits else 1
