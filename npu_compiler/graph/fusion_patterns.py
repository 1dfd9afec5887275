"""Rules that change the algorithm: attention by one kernel, and linears that share an input by one product."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from npu_compiler.artifact.recipes import IN_TURNS, ONE_AFTER_ANOTHER, WeightRecipe
from npu_compiler.graph.rewrite import Match, Replacement, Rule, Scene, apply, pattern
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.attention import capped_attention, scaled_dot_product_attention
from npu_compiler.ops.elementwise import div, mul
from npu_compiler.ops.registry import spelled, traits_of
from npu_compiler.ops.traits import Work
from npu_compiler.ops.views import slice_
from npu_compiler.tensor.layout import BufferSpec, dense

__all__ = ["PairsColumns", "are_paired", "attention_inputs", "broadcasts", "concatenated", "fuse_attention"]
__all__ += ["meet_in_pairs", "merged_linears", "merged_output", "scaled_queries", "scores_of"]
__all__ += ["share_heads", "slices_of", "weighted"]


def scores_of(ops: Any, q: Any, k: Any, scale: Any, scaled: str) -> Any:
    """``q @ k.T``, ``multiplied`` or ``divided`` by `scale` where `scaled` says so."""
    scores = ops.matmul(q, ops.transpose(k))
    if not scaled:
        return scores
    return ops.mul(scores, scale) if scaled == "multiplied" else ops.div(scores, scale)


def weighted(ops: Any, weights: Any, v: Any, cast: bool) -> Any:
    """``weights @ v``, in the data type of the values where they are `cast`."""
    return ops.matmul(ops.cast(weights) if cast else weights, v)


def attention(ops: Any, q: Any, k: Any, v: Any, scale: Any, mask: Any, *, scaled: str, masked: bool, cast: bool) -> Any:
    """``softmax(q @ k.T * scale + mask) @ v``, as models spell it out."""
    scores = scores_of(ops, q, k, scale, scaled)
    if masked:
        scores = ops.add(scores, mask)
    return weighted(ops, ops.softmax(scores), v, cast)


def attention_with_soft_cap(
    ops: Any, q: Any, k: Any, v: Any, scale: Any, cap: Any, mask: Any, *, scaled: str, masked: bool, cast: bool
) -> Any:
    """``softmax(tanh(q @ k.T * scale / cap) * cap + mask) @ v``."""
    scores = scores_of(ops, q, k, scale, scaled)
    scores = ops.mul(ops.tanh(ops.div(scores, cap)), cap)
    if masked:
        scores = ops.add(scores, mask)
    return weighted(ops, ops.softmax(scores), v, cast)


def _one_kernel(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    found = attention_inputs(match, scene)
    if isinstance(found, str):
        return found
    inputs, scaled = found
    attrs = {"scale": scaled.factor}
    op, cap = spelled(scaled_dot_product_attention), match.values.get("cap")
    if "cap" in match.values:
        if isinstance(cap, str) or not float(cap or 0) > 0:
            return f"its cap '{cap}' is no positive number"
        op, attrs["cap"] = spelled(capped_attention), float(cap or 0)
    node = OpNode(match.root.name, op, inputs, attrs, match.root.outputs)
    return Replacement((*scaled.nodes, node), scaled.tensors)


def attention_inputs(
    match: Match, scene: Scene, most_size: float = inf
) -> tuple[dict[str, str | tuple[str, ...]], ScaledQueries] | str:
    """What a node of attention takes in place of what is spelled out: queries, keys, values and a mask; or why it
    cannot, empty where the arithmetic only looks alike.

    Args:
        match: Of an equation with ``q``, ``k``, ``v``, ``scale`` and, where it is `masked`, ``mask``.
        scene: Where it was found.
        most_size: Of a head.
    """
    names, mask = match.names("q", "k", "v"), match.values.get("mask")
    if names is None or (match.form["masked"] and not isinstance(mask, str)):
        return ""  # a number in place of a tensor
    shapes = [scene.shape(name) for name in names]
    given = ", ".join(str(list(shape)) for shape in shapes)
    if any(len(shape) != 4 for shape in shapes) or len({shape[:2] for shape in shapes}) != 1:
        return f"queries, keys and values are {given}, expected four dimensions, of which two are the same"
    if max(shapes[0][3], shapes[2][3]) > most_size:
        return f"queries, keys and values are {given}, expected heads of at most {most_size}"
    if isinstance(mask, str) and not broadcasts(scene.shape(mask), (*shapes[0][:3], shapes[1][2])):
        return f"the mask {list(scene.shape(mask))} does not broadcast to the scores of {given}"
    scaled = scaled_queries(match, scene)
    if isinstance(scaled, str):
        return scaled
    inputs: dict[str, str | tuple[str, ...]] = {"query": scaled.query, "key": names[1], "value": names[2]}
    return inputs | ({"attn_mask": mask} if isinstance(mask, str) else {}), scaled


@dataclass(frozen=True)
class ScaledQueries:
    """How the scores of a match get their scale.

    Attributes:
        query: The queries to multiply by the keys.
        factor: What the products are multiplied by.
        nodes, tensors: What makes those queries, where the scale is a tensor, which they take instead of the scores.
    """

    query: str
    factor: float
    nodes: tuple[OpNode, ...] = ()
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)


def scaled_queries(match: Match, scene: Scene) -> ScaledQueries | str:
    """How the scores of attention that is spelled out, of queries ``q``, get their ``scale``; or why they cannot."""
    query, scale = str(match.values["q"]), match.values.get("scale", 1.0)
    divided = match.form["scaled"] == "divided"
    if not isinstance(scale, str):
        return ScaledQueries(query, 1 / float(scale) if divided else float(scale))
    given, factor = scene.graph.tensors[query], scene.graph.tensors[scale]
    if given.dtype != factor.dtype or not broadcasts(factor.shape, (*given.shape[:-1], 1)):
        by = f"its scale '{scale}' is a tensor {list(factor.shape)} of {factor.dtype}"
        return f"{by}, expected a number, or one of {given.dtype} for each row"
    name = f"{query} for {match.root.name}"
    op = spelled(div if divided else mul)
    node = OpNode(name, op, {"self": query, "other": scale}, {}, (name,))
    return ScaledQueries(name, 1.0, (node,), {name: replace(given, name=name)})


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape may stand for one of another."""
    padded = (1,) * (len(to) - len(shape)) + shape
    return len(shape) <= len(to) and all(n in (1, size) for n, size in zip(padded, to, strict=True))


ATTENTION = Rule(
    "attention by one kernel",
    tuple(
        pattern(equation, scaled=scaled, masked=masked, cast=cast)
        for equation, scaled, masked, cast in product(
            (attention, attention_with_soft_cap), ("multiplied", "divided", ""), (True, False), (False, True)
        )
    ),
    _one_kernel,
)


def fuse_attention(graph: IRGraph) -> IRGraph:
    """Replaces attention that is spelled out by the op that computes it without storing its scores."""
    return apply(graph, ATTENTION)


def repeated_heads(ops: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """``attention(q, repeat(k), repeat(v))``, where [B, G, L, D] is repeated into [B, G * n, L, D]."""
    many = (ops.shared(ops.reshape(ops.shared(ops.expand(ops.shared(ops.reshape(few)))))) for few in (k, v))
    return ops.attention(q, *many, mask)


def _shared_heads(site: Sequence[Match], scene: Scene) -> Replacement | str:
    (match,) = site
    node, few = match.root, match.names("k", "v")
    if few is None or not all(
        _is_repeated(name, str(node.inputs[key]), scene) for key, name in zip(_HEADS, few, strict=True)
    ):
        return ""
    inputs = {**node.inputs, **dict(zip(_HEADS, few, strict=True))}
    return Replacement((replace(node, inputs=inputs, attrs={**node.attrs, "enable_gqa": True}),))


_HEADS = ("key", "value")


def _is_repeated(few: str, many: str, scene: Scene) -> bool:
    """Whether `many` [B, G * n, L, D] is `few` [B, G, L, D] with each head n times, its copies side by side."""
    expanded = scene.producers[many].tensors()[0]
    lifted = scene.producers[expanded].tensors()[0]
    merged, repeated, single = (scene.shape(name) for name in (many, expanded, lifted))
    batch, heads, length, size = scene.shape(few) if len(scene.shape(few)) == 4 else (0, 0, 0, 0)
    return (
        len(repeated) == 5
        and single == (batch, heads, 1, length, size)
        and repeated == (batch, heads, repeated[2], length, size)
        and merged == (batch, heads * repeated[2], length, size)
    )


SHARED_HEADS = Rule("attention of shared heads", (pattern(repeated_heads, ("mask",)),), _shared_heads)


def share_heads(graph: IRGraph) -> IRGraph:
    """``attention(q, repeat(k), repeat(v))`` becomes attention whose heads share k and v, which are not repeated."""
    return apply(graph, SHARED_HEADS)


def a_linear(ops: Any, x: Any, weight: Any, bias: Any) -> Any:
    """``x @ weight.T + bias``."""
    return ops.linear(x, weight, bias)


def _shared_input(match: Match, scene: Scene) -> Hashable:
    names = match.names("x", "weight")
    return None if names is None else (names[0], "bias" in match.values, scene.graph.tensors[names[1]].dtype.name)


def _foreign_parameter(match: Match, scene: Scene) -> str:
    """Why the weight or bias of a linear cannot be concatenated with those of other linears; empty where they can."""
    weights = scene.graph.weights
    for name in match.names("weight", "bias") or ():
        if name not in weights or not weights[name].is_plain:
            return f"'{name}' is no tensor of the weight file"
        if len(scene.users[name]) > 1:
            return f"'{name}' is also read by '{next(u.name for u in scene.users[name] if u is not match.root)}'"
    return ""


PairsColumns = Callable[[TensorSpec, TensorSpec], bool]
"""Asked, of the input and the weight of a linear, whether an epilogue can combine two neighbouring columns of it."""


def merged_linears(pairs_columns: PairsColumns | None = None) -> Rule:
    """``[x @ a.T, x @ b.T]`` becomes ``split(x @ concat(a, b).T)``: the input is read once, by one kernel.

    All have a bias or none has; nothing else reads their weights.

    Args:
        pairs_columns: Where it says so, two linears of the same width put their columns in turns, so that an epilogue
            has the two that belong together side by side (a gated activation).
    """

    def merged(site: Sequence[Match], scene: Scene) -> Replacement | str:
        members = [match.root for match in site]
        in_turns = meet_in_pairs(members, scene.graph, scene.users) and are_paired(members, scene.graph, pairs_columns)
        tensors: dict[str, TensorSpec] = {}
        weights: dict[str, WeightRecipe] = {}
        inputs, output = _merged_weights(members, scene.graph, tensors, weights, in_turns)
        linear = OpNode(" + ".join(n.name for n in members), members[0].op, inputs, {}, (output,))
        slices = slices_of(members, output, scene.graph.tensors, in_turns)
        return Replacement((linear, *slices), tensors, weights)

    patterns = (pattern(a_linear, ("bias",)),)
    return Rule("one product with others of its input", patterns, merged, _shared_input, 2, _foreign_parameter)


def meet_in_pairs(members: list[OpNode], graph: IRGraph, users: Mapping[str, list[OpNode]]) -> bool:
    """Whether there are two linears of one width whose results meet in elementwise ops, as in a gated activation."""
    widths = [graph.tensors[node.outputs[0]].shape[-1] for node in members]
    if len(widths) != 2 or widths[0] != widths[1]:
        return False
    first, second = (set(_elementwise_readers(node.outputs[0], users)) for node in members)
    return not first.isdisjoint(second)


def are_paired(members: Sequence[OpNode], graph: IRGraph, pairs_columns: PairsColumns | None) -> bool:
    """Whether the target combines the columns of two linears that put theirs in turns."""
    given, weight = (graph.tensors[str(members[0].inputs[key])] for key in ("input", "weight"))
    both = TensorSpec(weight.name, (2 * weight.shape[0], *weight.shape[1:]), weight.dtype)
    return pairs_columns is not None and pairs_columns(given, both)


def _elementwise_readers(name: str, users: Mapping[str, list[OpNode]]) -> Iterator[str]:
    """Names of all nodes that only elementwise nodes lie between, from a tensor on, while all its readers are such."""
    waiting, seen = [name], {name}
    while waiting:
        readers = users.get(waiting.pop(), [])
        if not all(traits_of(node.op).work is Work.ELEMENTWISE for node in readers):
            continue
        for node in readers:
            yield node.name
            waiting += [made for made in node.outputs if made not in seen]
            seen.update(node.outputs)


def _merged_weights(
    members: list[OpNode],
    graph: IRGraph,
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightRecipe],
    in_turns: bool,
) -> tuple[dict[str, str | tuple[str, ...]], str]:
    """Declares the merged weight, bias and output; gives the merged linear's inputs and the name of its output."""
    inputs: dict[str, str | tuple[str, ...]] = {"input": members[0].inputs["input"]}
    for key in ("weight", "bias"):
        if key in members[0].inputs:
            parts = [str(node.inputs[key]) for node in members]
            inputs[key] = concatenated(parts, graph, tensors, weights, in_turns)
    name = merged_output(members, graph, tensors)
    return inputs, name


def concatenated(
    parts: Sequence[str],
    graph: IRGraph,
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightRecipe],
    in_turns: bool,
) -> str:
    """Declares the weight that has the rows of some others, which are of the weight file; gives its name."""
    transform = IN_TURNS if in_turns else ONE_AFTER_ANOTHER
    sources = tuple(graph.weights[part].inputs[0] for part in parts)
    name, spec = f"{transform}({', '.join(source.name for source in sources)})", graph.tensors[parts[0]]
    shape = (sum(graph.tensors[part].shape[0] for part in parts), *spec.shape[1:])
    tensors[name] = TensorSpec(name, shape, spec.dtype)
    weights[name] = WeightRecipe(BufferSpec(name, spec.dtype, spec.dtype, dense(shape)), sources, transform)
    return name


def merged_output(members: Sequence[OpNode], graph: IRGraph, tensors: dict[str, TensorSpec]) -> str:
    """Declares the result of the product that linears become, their columns side by side; gives its name."""
    output = graph.tensors[members[0].outputs[0]]
    width = sum(graph.tensors[node.outputs[0]].shape[-1] for node in members)
    name = f"{' + '.join(node.name for node in members)}"
    tensors[name] = TensorSpec(name, (*output.shape[:-1], width), output.dtype)
    return name


def slices_of(
    members: Sequence[OpNode], source: str, tensors: Mapping[str, TensorSpec], in_turns: bool
) -> Iterator[OpNode]:
    """The nodes that give each linear's own result back, as views."""
    start = 0
    for number, node in enumerate(members):
        width = tensors[node.outputs[0]].shape[-1]
        bounds = (number, 2 * width, 2) if in_turns else (start, start + width, 1)
        attrs = dict(zip(("dim", "start", "end", "step"), (-1, *bounds), strict=True))
        yield OpNode(f"{node.name} of {source}", spelled(slice_), {"self": source}, attrs, node.outputs)
        start += width
