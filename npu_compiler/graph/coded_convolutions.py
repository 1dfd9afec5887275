"""Convolutions of numbers that were made of codes, as convolutions of the codes themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from npu_compiler.dtypes import FLOAT32, INT8, UINT8
from npu_compiler.graph.coded_pooling import pool_codes
from npu_compiler.graph.rewrite import Match, Replacement, Rule, Scene, apply, pattern
from npu_compiler.graph.unsigned_codes import count_codes_from_zero
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.coded_convolution import coded_convolution, filter_codes
from npu_compiler.ops.registry import spelled, traits_of

__all__ = ["MultipliesCodes", "convolution_of_numbers", "convolve_codes"]

MultipliesCodes = Callable[[TensorSpec, TensorSpec, int], bool]
"""Whether a target multiplies the codes of an image by those of a filter, in so many groups of channels."""

_GEOMETRY = ("stride", "padding", "dilation", "groups")


def convolution_of_numbers(
    ops: Any, codes: Any, scale: Any, zero_point: Any, filters: Any, scales: Any, zeros: Any, bias: Any
) -> Any:
    """``conv((codes - zero_point) * scale, (filters - zeros) * scales) + bias``."""
    image, weight = ops.numbers(codes, scale, zero_point), ops.numbers_by_output(filters, scales, zeros)
    return ops.convolution(ops.shared(image), ops.shared(weight), bias)


def _of_codes(site: Sequence[Match], scene: Scene, multiplies: MultipliesCodes) -> Replacement | str:
    (match,) = site
    root, tensors = match.root, scene.graph.tensors
    names = match.names("codes", "filters", "scales", "zeros", "bias")
    scale, zero = match.values["scale"], match.values["zero_point"]
    if names is None or isinstance(scale, str) or not isinstance(zero, int):
        return ""
    image, weight = tensors[names[0]], tensors[names[1]]
    groups = root.attrs.get("groups", 1)
    is_image = len(image.shape) == len(weight.shape) == 4 in traits_of(root.op).image_ranks
    if not is_image or image.dtype not in (INT8, UINT8) or weight.dtype != INT8 or type(groups) is not int:
        return ""
    if names[1] not in scene.graph.weights or not multiplies(image, weight, groups):
        return ""
    (output,) = root.outputs
    made = [f"{output}.{part}" for part in ("filter", "factors", "terms")]
    filters = {"codes": "filters", "scales": "scales", "zeros": "zeros", "bias": "bias"}
    inputs = {key: str(match.values[variable]) for key, variable in filters.items() if variable in match.values}
    prepared = OpNode(
        f"{root.name}.codes", spelled(filter_codes), inputs, {"scale": scale, "zero_point": zero}, tuple(made)
    )
    operands = dict(zip(("input", "weight", "factors", "terms"), (names[0], *made), strict=True))
    attrs = {key: root.attrs[key] for key in _GEOMETRY if key in root.attrs} | {"outside": zero}
    result = OpNode(root.name, spelled(coded_convolution), operands, attrs, root.outputs)
    by_output = weight.shape[:1]
    declared = {
        made[0]: TensorSpec(made[0], weight.shape, INT8),
        **{name: TensorSpec(name, by_output, FLOAT32) for name in made[1:]},
    }
    return Replacement((prepared, result), declared)


def convolve_codes(graph: IRGraph, multiplies: MultipliesCodes) -> IRGraph:
    """The graph whose convolutions take codes where the target multiplies them.

    Sums of integers are exact; scales and zero points of image and filter become a factor and a term for each output,
    which are made once, when weights are loaded. This comes before what no input reaches is computed.
    """
    equation = pattern(convolution_of_numbers, ("zeros", "bias"))
    rule = Rule("a convolution of codes", (equation,), partial(_of_codes, multiplies=multiplies))
    return apply(pool_codes(count_codes_from_zero(graph)), rule)
