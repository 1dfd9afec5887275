"""Linears of one input whose weights are packed codes of one form become one product, as those of plain weights do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.graph.fusion_patterns import (
    PairsColumns,
    are_paired,
    concatenated,
    meet_in_pairs,
    merged_linears,
    merged_output,
    slices_of,
)
from npu_compiler.graph.rewrite import Match, Replacement, Rule, Scene, pattern
from npu_compiler.ir import OpNode, TensorSpec

__all__ = ["merged_coded_linears", "ways_to_merge_linears"]

_BY_ROW = ("codes", "scales", "zeros", "biases")
_PARTS = (*_BY_ROW, "codebook")


def coded_linear(ops: Any, x: Any, codes: Any, scales: Any, zeros: Any, biases: Any, codebook: Any, bias: Any) -> Any:
    """``x @ numbers(codes).T + bias``."""
    return ops.linear(x, ops.coded(codes, scales, zeros, biases, codebook), bias)


def _form(match: Match, scene: Scene) -> Hashable:
    """What linears have in common that can be one: the input, which parts there are, their types, and all options."""
    coded = match.nodes[1]
    parts = {part: str(match.values[part]) for part in _PARTS if part in match.values}
    kinds = tuple((part, scene.graph.tensors[name].dtype.name) for part, name in parts.items())
    if scene.graph.tensors[coded.outputs[0]].shape[:-1] != scene.shape(parts["codes"])[:1]:
        return None
    return match.values["x"], "bias" in match.values, kinds, parts.get("codebook"), tuple(sorted(coded.attrs.items()))


def _obstacle(match: Match, scene: Scene) -> str:
    """Why the parts of a linear's weight cannot be concatenated with those of others; empty where they can."""
    weights = scene.graph.weights
    for name in match.names(*(part for part in (*_BY_ROW, "bias") if part in match.values)) or ():
        if name not in weights or not weights[name].is_plain:
            return f"'{name}' is no tensor of the weight file"
        if len(scene.users[name]) > 1:
            return f"'{name}' is also read by another node than '{match.nodes[-1].name}'"
    rows = match.nodes[1].attrs.get("rows", 1)
    if not isinstance(rows, int) or rows < 1 or scene.shape(str(match.values["codes"]))[0] % rows:
        return f"its rows are no multiple of the {rows} that share scales"
    return ""


def merged_coded_linears(pairs_columns: PairsColumns | None = None) -> Rule:
    """As `fusion_patterns.merged_linears`, of weights that are `npu_codes.dequantize` of tensors of the weight file."""

    def merged(site: Sequence[Match], scene: Scene) -> Replacement | str:
        given, members, coded = scene.graph, [match.root for match in site], [match.nodes[1] for match in site]
        alone = coded[0].attrs.get("rows", 1) == 1  # rows that share scales cannot take turns
        in_turns = alone and meet_in_pairs(members, given, scene.users) and are_paired(members, given, pairs_columns)
        tensors: dict[str, TensorSpec] = {}
        weights: dict[str, WeightRecipe] = {}

        def joined(variable: str) -> str:
            return concatenated([str(match.values[variable]) for match in site], given, tensors, weights, in_turns)

        parts: dict[str, str | tuple[str, ...]] = {key: joined(key) for key in _BY_ROW if key in site[0].values}
        if "codebook" in site[0].values:
            parts["codebook"] = str(site[0].values["codebook"])
        inputs: dict[str, str | tuple[str, ...]] = {"input": str(site[0].values["x"])}
        if "bias" in site[0].values:
            inputs["bias"] = joined("bias")
        output, numbers = merged_output(members, given, tensors), " + ".join(node.outputs[0] for node in coded)
        spec = given.tensors[coded[0].outputs[0]]
        rows = sum(given.tensors[node.outputs[0]].shape[0] for node in coded)
        tensors[numbers] = TensorSpec(numbers, (rows, *spec.shape[1:]), spec.dtype)
        inputs["weight"] = numbers
        weight = OpNode(" + ".join(node.name for node in coded), coded[0].op, parts, coded[0].attrs, (numbers,))
        linear = OpNode(" + ".join(node.name for node in members), members[0].op, inputs, {}, (output,))
        slices = slices_of(members, output, given.tensors, in_turns)
        return Replacement((weight, linear, *slices), tensors, weights)

    patterns = (pattern(coded_linear, ("zeros", "biases", "codebook", "bias")),)
    return Rule("one product with others of its input", patterns, merged, _form, 2, _obstacle)


def ways_to_merge_linears(pairs_columns: PairsColumns | None = None) -> tuple[Rule, ...]:
    """All rules by which linears of one input become one product, one for each form of weights."""
    return merged_coded_linears(pairs_columns), merged_linears(pairs_columns)
