"""Transposed convolutions, which spread each element of an image over a window of a larger one.

With a stride of s, neighbouring results are made of different taps: those at positions t with the same remainder of
t / s are a convolution by every s-th tap. All of these are one convolution with s times the channels for each spatial
dimension, whose results are put in turns; where a window is as long as its stride, they are one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from npu_compiler.integers import ceil_div
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.convolution import IMAGES, Sliding, conv, convolve, filtering, flops, sizes, with_batch
from npu_compiler.ops.linear import product
from npu_compiler.ops.padding import along, divided, surrounded
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.symbolic import OpRefusal, Tensor

_spreading = partial(filtering, images={"input": "image"}, term=Term("spreading", ("input", "weight", "bias")))


@_spreading("aten.conv_transpose1d.default", image_ranks=(3,))
@_spreading("aten.conv_transpose2d.input")
@_spreading("aten.conv_transpose3d.input", image_ranks=(5,))
def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """[N, C, L...] spread by weight [C, O / groups, K...]: of (L - 1) * stride - 2 * padding + K + output_padding."""
    x, rank = with_batch(input, weight), len(weight.shape) - 2
    steps, gaps = sizes(stride, rank, "stride"), sizes(dilation, rank, "dilation")
    cut, more = sizes(padding, rank, "padding"), sizes(output_padding, rank, "output_padding")
    channels, kernel = x.shape[1], weight.shape[2:]
    if groups < 1 or channels % groups or channels != weight.shape[0] or prod(kernel) == 0:
        raise OpRefusal(f"{channels} channels, weight {list(weight.shape)} and groups={groups} do not fit together")
    within = all(0 <= m < max(s, d) for m, s, d in zip(more, steps, gaps, strict=True))
    if min(*steps, *gaps) < 1 or min(cut) < 0 or not within:
        raise OpRefusal(f"given stride={steps}, padding={cut}, output_padding={more}, dilation={gaps}: out of range")
    weight = _without_gaps(weight, gaps) if max(gaps) > 1 else weight
    kernel = weight.shape[2:]
    out = [(n - 1) * s - 2 * p + k + m for n, s, p, k, m in zip(x.shape[2:], steps, cut, kernel, more, strict=True)]
    if min(out) < 1 or 0 in x.shape:
        raise OpRefusal(f"nothing is left of {list(x.shape[2:])} with padding={cut}")
    covered = all(p + o <= n * s for n, s, p, o in zip(x.shape[2:], steps, cut, out, strict=True))
    if groups == 1 and tuple(kernel) == steps and covered:
        result = _by_product(x, weight, steps, cut, out)
    else:
        result = _by_phases(x, weight, steps, cut, out, groups)
    if bias is not None:
        result = result + bias.reshape((-1, *(1,) * rank))
    return result if x is input else result.reshape(result.shape[1:])


def _without_gaps(weight: Tensor, gaps: Sequence[int]) -> Tensor:
    """Filters with zeros between taps that are so far apart."""
    for dim, gap in enumerate(gaps, 2):
        ahead, behind = weight.shape[:dim], weight.shape[dim + 1 :]
        spaced = surrounded(weight.reshape((*ahead, weight.shape[dim], 1, *behind)), dim + 1, 0, gap - 1)
        taps = weight.shape[dim]
        weight = spaced.reshape((*ahead, taps * gap, *behind)).slice(dim, 0, (taps - 1) * gap + 1)
    return weight


def _turns(x: Tensor, dim: int, out: int, start: int, step: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of the positions from `start` on by `step`, along a dimension."""
    position = along(x, dim, out) + start
    quotient = divided(position, step)
    return quotient, position - quotient * step


def _by_product(x: Tensor, weight: Tensor, steps: Sequence[int], cut: Sequence[int], out: Sequence[int]) -> Tensor:
    """Where windows do not overlap, each element times all of its window is a product."""
    rank = len(steps)
    channels, outputs = weight.shape[:2]
    batch, size = x.shape[0], x.shape[2:]
    rows = x.permute((0, *range(2, rank + 2), 1)).reshape((-1, channels))
    windows = product(rows, weight.reshape((channels, -1))).reshape((batch, *size, outputs, *steps))
    places: dict[int, Tensor] = {}
    for axis in range(rank):
        place = _turns(windows, 1 + axis, out[axis], cut[axis], steps[axis])
        places |= {1 + axis: place[0], 2 + rank + axis: place[1]}
    result = windows.at(places).reshape((batch, *out, outputs)).permute((0, rank + 1, *range(1, rank + 1)))
    return x.trace.map(result, role="image")


def _by_phases(
    x: Tensor, weight: Tensor, steps: Sequence[int], cut: Sequence[int], out: Sequence[int], groups: int
) -> Tensor:
    rank, batch, each = len(steps), x.shape[0], weight.shape[1]
    taps = [ceil_div(k, s) for k, s in zip(weight.shape[2:], steps, strict=True)]
    first = [p // s for p, s in zip(cut, steps, strict=True)]
    counts = [(p + o - 1) // s + 1 - f for p, o, s, f in zip(cut, out, steps, first, strict=True)]
    before = []
    for axis, (count, tap) in enumerate(zip(first, taps, strict=True)):
        ahead = tap - 1 - count
        x = x.slice(2 + axis, -ahead, x.shape[2 + axis] + ahead) if ahead < 0 else x
        before.append(max(0, ahead))
    ones = (1,) * rank
    phases = convolve(x, _phase_filters(weight, steps, taps, groups), None, Sliding(ones, before, ones, counts), groups)
    if prod(steps) == 1:
        return phases
    phases = phases.reshape((batch, groups, *steps, each, *counts))
    places: dict[int, Tensor] = {}
    for axis in range(rank):
        dim, start = 3 + rank + axis, cut[axis] - first[axis] * steps[axis]
        place = _turns(phases, dim, out[axis], start, steps[axis])
        places |= {dim: place[0], 2 + axis: place[1]}
    return x.trace.map(phases.at(places).reshape((batch, groups * each, *out)), role="image")


def _phase_filters(weight: Tensor, steps: Sequence[int], taps: Sequence[int], groups: int) -> Tensor:
    """Filters [I, O / groups, ...] as those of a convolution: for each remainder, every so many taps, backwards."""
    rank, (inputs, each), kernel = len(steps), weight.shape[:2], weight.shape[2:]
    for axis, (k, tap, step) in enumerate(zip(kernel, taps, steps, strict=True)):
        weight = surrounded(weight, 2 + axis, 0, tap * step - k)
    split = [size for pair in zip(taps, steps, strict=True) for size in pair]
    apart = weight.reshape((groups, inputs // groups, each, *split))
    turned = apart.permute((0, *range(4, 3 + 2 * rank, 2), 2, 1, *range(3, 3 + 2 * rank, 2)))
    inner = rank + 2
    turned = turned.flip(*range(inner + 1, inner + 1 + rank))
    order = (3, 4, 1, 2) if rank == 3 and tuple(taps[1:]) != (1, 1) else (*range(2, rank + 2), 1)
    stored = weight.trace.map(turned, order=(*range(inner), *(inner - 1 + dim for dim in order)))
    return stored.reshape((groups * prod(steps) * each, inputs // groups, *taps))


def _is_plain(node: OpNode, graph: IRGraph) -> bool:
    return not node.attrs.get("transposed")


@filtering(
    "aten.convolution.default",
    images=IMAGES,
    image_ranks=(3, 4, 5),
    term=Term("convolution", ("input", "weight", "bias"), holds=_is_plain),
)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """A convolution in its general form: of lines, images or volumes, transposed or not."""
    if transposed:
        return conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(input, weight, bias, stride, padding, dilation, groups)


@op("aten._convolution.default", work=Work.ANCHOR, is_learned=True, flops=flops)
def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    benchmark: bool = False,
    deterministic: bool = False,
    cudnn_enabled: bool = True,
    allow_tf32: bool = True,
) -> Tensor:
    """`convolution`, with switches that concern other libraries."""
    return convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
