"""Passes over the graph: each takes a verified graph and gives one that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.graph.attention_sinks import fuse_attention_with_sinks
from npu_compiler.graph.coded_convolutions import MultipliesCodes, convolve_codes
from npu_compiler.graph.coded_linears import ways_to_merge_linears
from npu_compiler.graph.constants import fold_constants, read_no_shapes
from npu_compiler.graph.functional import functionalize
from npu_compiler.graph.fusion_patterns import PairsColumns, fuse_attention, share_heads
from npu_compiler.graph.linear_spelling import spell_linears
from npu_compiler.graph.rewrite import Match, Replacement, Rule, Scene, apply, pattern
from npu_compiler.graph.row_pushdown import push_down_selections
from npu_compiler.graph.shared_codes import share_codes
from npu_compiler.graph.windowed_attention import fuse_windowed_attention, leave_scales_to_scores
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.indexing import picked
from npu_compiler.ops.registry import traits_of
from npu_compiler.ops.traits import Traits
from npu_compiler.tensor.layout import BufferSpec, dense

__all__ = ["eliminate_noops", "fold_batch_norms", "optimize"]

Pass = Callable[[IRGraph], IRGraph]


def optimize(
    graph: IRGraph,
    pairs_columns: PairsColumns | None = None,
    launch_flops: int = 0,
    multiplies_codes: MultipliesCodes | None = None,
) -> IRGraph:
    """Runs all passes in order; the graph is verified after each that changed it.

    Args:
        graph: A graph as it was read.
        pairs_columns: Asked whether the target's epilogue can combine two neighbouring columns of a linear; where it is
            not given, none can.
        launch_flops: Arithmetic that takes the target as long as one more small launch.
        multiplies_codes: Asked whether the target convolves images of codes; where it is not given, it does not.
    """
    passes: tuple[Pass, ...] = (
        functionalize,
        eliminate_noops,
        read_no_shapes,
        fuse_windowed_attention,
        *(() if multiplies_codes is None else (partial(convolve_codes, multiplies=multiplies_codes),)),
        fold_constants,
        share_codes,
        spell_linears,
        fold_batch_norms,
        fuse_attention,
        fuse_attention_with_sinks,
        share_heads,
        leave_scales_to_scores,
        partial(push_down_selections, launch_flops=launch_flops),
        *(partial(apply, rule=rule) for rule in ways_to_merge_linears(pairs_columns)),
    )
    for run in passes:
        made = run(graph)
        graph = graph if made is graph else made.verify()
    return graph


def eliminate_noops(graph: IRGraph) -> IRGraph:
    """Removes nodes whose result is their operand: clone, detach, dropout in evaluation, needless conversions.

    The choice among several results is one of them. Results behind the last one that is read are not made: a norm whose
    statistics nobody asks for gives one result, however it is spelled.
    """
    names: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = node.renamed(names)
        source = _same_as(node, graph.tensors)
        if source is None:
            nodes.append(node)
        else:
            names[node.outputs[0]] = source
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    read = {*outputs, *(name for node in nodes for name in node.tensors())}
    kept = tuple(_without_unread(node, read) for node in nodes if node.outputs)
    return replace(graph, nodes=kept, outputs=outputs)


def _without_unread(node: OpNode, read: Container[str]) -> OpNode:
    last = max((place for place, name in enumerate(node.outputs) if name in read), default=0)
    return node if last + 1 == len(node.outputs) else replace(node, outputs=node.outputs[: last + 1])


def _same_as(node: OpNode, tensors: Mapping[str, TensorSpec]) -> str | None:
    """The operand that the node's only result equals, element by element, if there is one."""
    known = traits_of(node.op, node.attrs)
    if len(node.outputs) != 1:
        return None
    if known.picks:
        return picked(node)
    source = next(iter(node.tensors()), None)
    if source is None:
        return None
    given, made = tensors[source], tensors[node.outputs[0]]
    if not known.keeps_order and not _turns_nothing(node, known, len(given.shape)):
        return None
    return source if (given.shape, given.dtype) == (made.shape, made.dtype) else None


def _turns_nothing(node: OpNode, known: Traits, rank: int) -> bool:
    """Whether a node leaves the dimensions of its operand in their order."""
    if known.turn is None or not rank:
        return known.turn is not None
    try:
        return list(known.turn(node.attrs, rank)) == list(range(rank))
    except (TypeError, ValueError, IndexError):  # attributes that the definition refuses
        return False


def normed_convolution(ops: Any, x: Any, w: Any, b: Any, gain: Any, shift: Any, centre: Any, variance: Any) -> Any:
    """``batch_norm(conv(x, w) + b)``."""
    return ops.batch_norm(ops.convolution(x, w, b), gain, shift, centre, variance)


def normed_spreading(ops: Any, x: Any, w: Any, b: Any, gain: Any, shift: Any, centre: Any, variance: Any) -> Any:
    """``batch_norm(transposed_conv(x, w) + b)``."""
    return ops.batch_norm(ops.spreading(x, w, b), gain, shift, centre, variance)


def normed_linear(ops: Any, x: Any, w: Any, b: Any, gain: Any, shift: Any, centre: Any, variance: Any) -> Any:
    """``batch_norm(linear(x, w) + b)``."""
    return ops.batch_norm(ops.linear(x, w, b), gain, shift, centre, variance)


def _folded(site: Sequence[Match], scene: Scene, spreads: bool = False) -> Replacement | str:
    (match,) = site
    norm, filtering = match.nodes
    names, by_channel = match.names("w", "b", "gain", "shift", "centre", "variance"), match.names(*_BY_CHANNEL)
    if names is None or by_channel is None or norm.attrs.get("training"):
        return ""
    weights, shape = scene.graph.weights, scene.shape(names[0])
    rank, groups = len(shape), filtering.attrs.get("groups", 1)
    if type(groups) is not int or groups < 1 or rank < 2 or (rank == 2 and len(scene.shape(norm.outputs[0])) != 2):
        return ""  # of a linear's result, the channels of more dimensions are others
    channels = (shape[1] * groups,) if spreads else shape[:1]
    fits = all(scene.shape(name) == channels for name in by_channel)
    if not fits or type(norm.attrs.get("eps", 1e-5)) not in (int, float):
        return ""  # the definitions refuse it
    if "shift" in match.values and "gain" not in match.values:
        return "it shifts without scaling, for which there is no recipe"
    strangers = [name for name in names if name not in weights or not weights[name].is_plain]
    if strangers:
        return f"'{strangers[0]}' is no tensor of the weight file"
    tensors: dict[str, TensorSpec] = {}
    made: dict[str, WeightRecipe] = {}
    weight, bias = f"{norm.outputs[0]}.weight", f"{norm.outputs[0]}.bias"
    _add_folded(match, scene.graph, weight, bias, tensors, made, groups if spreads else 0)
    node = replace(
        filtering,
        name=f"{filtering.name} + {norm.name}",
        inputs={"input": filtering.inputs["input"], "weight": weight, "bias": bias},
        outputs=norm.outputs,
    )
    return Replacement((node,), tensors, made)


_BY_CHANNEL = ("b", "gain", "shift", "centre", "variance")
_ABSENT = ("b", "gain", "shift")
FOLDED_NORM = Rule(
    "a convolution with the BatchNorm in its weights",
    (pattern(normed_convolution, _ABSENT),),
    _folded,
)
FOLDED_SPREADING = Rule(
    "a transposed convolution with the BatchNorm in its weights",
    (pattern(normed_spreading, _ABSENT),),
    partial(_folded, spreads=True),
)
FOLDED_LINEAR = Rule("a linear with the BatchNorm in its weights", (pattern(normed_linear, _ABSENT),), _folded)


def fold_batch_norms(graph: IRGraph) -> IRGraph:
    """``batch_norm(conv(x, w) + b)`` becomes ``conv(x, w * s) + b'``, where s and b' are made when weights are loaded.

    So do transposed convolutions, and linears whose result has no dimensions but a batch and channels. A BatchNorm
    stays as it is where what it norms has another reader, or where a tensor it would fold is not a weight.
    """
    for rule in (FOLDED_NORM, FOLDED_SPREADING, FOLDED_LINEAR):
        graph = apply(graph, rule)
    return graph


def _add_folded(
    match: Match,
    graph: IRGraph,
    weight: str,
    bias: str,
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightRecipe],
    spread_groups: int,
) -> None:
    """Declares the folded weight and bias, with the recipes that make them.

    Args:
        match: Where the equation holds.
        graph: The graph.
        weight, bias: What they are to be called.
        tensors, weights: Get their descriptions and recipes.
        spread_groups: The groups of a transposed convolution; 0 for what is none.
    """
    given = {variable: str(value) for variable, value in match.values.items()}
    eps = (("eps", float(match.root.attrs.get("eps", 1e-5))),)
    affine = [given[key] for key in ("gain", "shift") if key in given]
    shape, kind = graph.tensors[given["w"]].shape, graph.tensors[given["w"]].dtype

    def declare(
        name: str, size: tuple[int, ...], sources: list[str], transform: str, attrs: tuple[tuple[str, float], ...] = eps
    ) -> None:
        tensors[name] = TensorSpec(name, size, kind)
        inputs = tuple(graph.weights[source].inputs[0] for source in sources)
        weights[name] = WeightRecipe(BufferSpec(name, kind, kind, dense(size)), inputs, transform, attrs)

    scaling = [given["w"], given["variance"], *affine[:1]]
    if spread_groups:
        declare(weight, shape, scaling, "fold_spread_weight", (*eps, ("groups", float(spread_groups))))
    else:
        declare(weight, shape, scaling, "fold_weight")
    statistics, channels = [given["centre"], given["variance"], *affine], graph.tensors[given["centre"]].shape
    if "b" in given:
        declare(bias, channels, [given["b"], *statistics], "fold_given_bias")
    else:
        declare(bias, channels, statistics, "fold_bias")
