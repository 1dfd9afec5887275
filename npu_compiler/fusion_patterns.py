"""Rewrites that change the algorithm: attention by one kernel, and linears that share an input by one product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.layout import BufferSpec, dense
from npu_compiler.ops.attention import scaled_dot_product_attention
from npu_compiler.ops.registry import spelled, traits_of
from npu_compiler.ops.traits import Traits, Work
from npu_compiler.ops.views import slice_
from npu_compiler.recipes import WeightRecipe
from npu_compiler.rewrite import Match, Pattern, find, pattern

__all__ = ["ATTENTION", "fuse_attention", "linears_by_input", "merge_linears", "share_heads", "without_dead_nodes"]


def attention(ops: Any, q: Any, k: Any, v: Any, scale: Any, mask: Any, *, scaled: str, masked: bool, cast: bool) -> Any:
    """``softmax(q @ k.T * scale + mask) @ v``, as models spell it out."""
    scores = ops.matmul(q, ops.transpose(k))
    if scaled:
        scores = ops.mul(scores, scale) if scaled == "multiplied" else ops.div(scores, scale)
    if masked:
        scores = ops.add(scores, mask)
    weights = ops.softmax(scores)
    return ops.matmul(ops.cast(weights) if cast else weights, v)


_FORMS = [
    {"scaled": scaled, "masked": masked, "cast": cast}
    for scaled, masked, cast in product(("multiplied", "divided", ""), (True, False), (False, True))
]
ATTENTION: Mapping[Pattern, Mapping[str, Any]] = {
    pattern("attention", attention, ("q", "k", "v", "scale", "mask"), **form): form for form in _FORMS
}


def fuse_attention(graph: IRGraph) -> IRGraph:
    """Replaces attention that is spelled out by the op that computes it without storing its scores."""
    replacements: dict[str, OpNode] = {}
    gone: set[str] = set()
    for form, match in find(graph, tuple(ATTENTION)):
        node = _attention_node(graph, match, ATTENTION[form]) if isinstance(match, Match) else None
        if node is not None and isinstance(match, Match):
            replacements[node.name] = node
            gone.update(inner.name for inner in match.nodes if inner is not match.root)
    return replace(graph, nodes=tuple(replacements.get(n.name, n) for n in graph.nodes if n.name not in gone))


def _attention_node(graph: IRGraph, match: Match, form: Mapping[str, Any]) -> OpNode | None:
    values = match.values
    scale = values.get("scale", 1.0)
    mask = values.get("mask")
    tensors = [values["q"], values["k"], values["v"]]
    if isinstance(scale, str) or (form["masked"] and not isinstance(mask, str)) or not all(map(_is_name, tensors)):
        return None
    shapes = [graph.tensors[str(name)].shape for name in tensors]
    if any(len(shape) != 4 for shape in shapes) or len({shape[:2] for shape in shapes}) != 1:
        return None
    if isinstance(mask, str) and not _broadcasts(graph.tensors[mask].shape, (*shapes[0][:3], shapes[1][2])):
        return None
    inputs = {"query": str(values["q"]), "key": str(values["k"]), "value": str(values["v"])}
    if isinstance(mask, str):
        inputs["attn_mask"] = mask
    factor = 1 / float(scale) if form["scaled"] == "divided" else float(scale)
    return OpNode(match.root.name, spelled(scaled_dot_product_attention), inputs, {"scale": factor}, match.root.outputs)


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    padded = (1,) * (len(to) - len(shape)) + shape
    return len(shape) <= len(to) and all(n in (1, size) for n, size in zip(padded, to, strict=True))


def share_heads(graph: IRGraph) -> IRGraph:
    """``attention(q, repeat(k), repeat(v))`` becomes attention whose heads share k and v, which are not repeated."""
    producers = graph.producers()
    nodes = []
    for node in graph.nodes:
        sources = {key: _before_repeat(str(node.inputs[key]), graph, producers) for key in traits_of(node.op).grouped}
        inputs = {key: source for key, source in sources.items() if source is not None}
        if inputs and len(inputs) == len(sources):
            attrs = {**node.attrs, "enable_gqa": True}
            node = replace(node, inputs={**node.inputs, **inputs}, attrs=attrs)
        nodes.append(node)
    return without_dead_nodes(replace(graph, nodes=tuple(nodes)))


_REPEATING: tuple[Callable[[Traits], bool], ...] = (
    lambda last: last.reshapes,
    lambda middle: middle.repeats,
    lambda first: first.reshapes,
)


def _before_repeat(name: str, graph: IRGraph, producers: Mapping[str, OpNode]) -> str | None:
    """The [B, G, L, D] that unsqueeze, expand and reshape repeated into [B, G * n, L, D]."""
    chain = []
    for is_step in _REPEATING:
        node = producers.get(name)
        if node is None or not is_step(traits_of(node.op)):
            return None
        chain.append(graph.tensors[name].shape)
        name = str(next(node.tensors()))
    merged, repeated, lifted = chain
    batch, heads, length, size = graph.tensors[name].shape if len(graph.tensors[name].shape) == 4 else (0, 0, 0, 0)
    fits = (
        len(repeated) == 5
        and lifted == (batch, heads, 1, length, size)
        and repeated == (batch, heads, repeated[2], length, size)
        and merged == (batch, heads * repeated[2], length, size)
    )
    return name if fits else None


def without_dead_nodes(graph: IRGraph) -> IRGraph:
    """Removes nodes whose result nobody reads."""
    needed = set(graph.outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(node.tensors())
    return replace(graph, nodes=tuple(reversed(nodes)))


def merge_linears(graph: IRGraph, interleave: bool) -> IRGraph:
    """``[x @ a.T, x @ b.T]`` becomes ``split(x @ concat(a, b).T)``: the input is read once, by one kernel.

    Args:
        graph: Any graph.
        interleave: Whether two linears of the same width put their columns in turns, so that an epilogue has the two
            that belong together side by side (a gated activation).
    """
    users = graph.users()
    merged: dict[str, list[OpNode]] = {}
    removed: set[str] = set()
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    for members in linears_by_input(graph, users):
        in_turns = interleave and _pairs(members, graph, users)
        inputs, outputs = _merged_weights(members, graph, tensors, weights, in_turns)
        first = members[0]
        linear = OpNode(" + ".join(n.name for n in members), first.op, inputs, {}, (outputs,))
        slices = list(_slices(members, outputs, tensors, in_turns))
        merged[first.name] = [linear, *slices]
        removed.update(node.name for node in members)
    nodes = [n for node in graph.nodes for n in merged.get(node.name, [] if node.name in removed else [node])]
    read = {name for node in nodes for name in node.tensors()} | set(graph.outputs)
    kept = {name: recipe for name, recipe in weights.items() if name in read}
    return replace(graph, nodes=tuple(nodes), tensors=tensors, weights=kept)


def linears_by_input(graph: IRGraph, users: Mapping[str, list[OpNode]]) -> Iterator[list[OpNode]]:
    """Linears that can be one: of one input, with or without bias alike, of weights that nothing else reads."""
    groups: dict[tuple[str, bool, str], list[OpNode]] = {}
    for node in graph.nodes:
        stacked = traits_of(node.op).stacked
        if not stacked:
            continue
        parameters = [str(node.inputs[key]) for key in stacked if key in node.inputs]
        own = all(
            name in graph.weights and len(users[name]) == 1 and graph.weights[name].is_plain for name in parameters
        )
        if own:
            kind = graph.tensors[parameters[0]].dtype.name
            groups.setdefault((str(node.inputs["input"]), "bias" in node.inputs, kind), []).append(node)
    return (members for members in groups.values() if len(members) > 1)


def _pairs(members: list[OpNode], graph: IRGraph, users: Mapping[str, list[OpNode]]) -> bool:
    """Whether two linears are of one width, and elementwise work combines their results, as in a gated activation."""
    widths = [graph.tensors[node.outputs[0]].shape[-1] for node in members]
    if len(widths) != 2 or widths[0] != widths[1]:
        return False
    first, second = (set(_elementwise_readers(node.outputs[0], users)) for node in members)
    return not first.isdisjoint(second)


def _elementwise_readers(name: str, users: Mapping[str, list[OpNode]]) -> Iterator[str]:
    """The readers of a tensor, those of their results, and so on, as long as all readers of one are elementwise."""
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
    transform = "interleave" if in_turns else "concatenate"
    for key in ("weight", "bias"):
        if key not in members[0].inputs:
            continue
        parts = [str(node.inputs[key]) for node in members]
        name = f"{transform}({', '.join(weights[part].inputs[0].name for part in parts)})"
        spec = graph.tensors[parts[0]]
        shape = (sum(graph.tensors[part].shape[0] for part in parts), *spec.shape[1:])
        tensors[name] = TensorSpec(name, shape, spec.dtype)
        sources = tuple(weights[part].inputs[0] for part in parts)
        weights[name] = WeightRecipe(BufferSpec(name, spec.dtype, spec.dtype, dense(shape)), sources, transform)
        inputs[key] = name
    output = graph.tensors[members[0].outputs[0]]
    width = sum(graph.tensors[node.outputs[0]].shape[-1] for node in members)
    name = f"{' + '.join(node.name for node in members)}"
    tensors[name] = TensorSpec(name, (*output.shape[:-1], width), output.dtype)
    return inputs, name


def _slices(members: list[OpNode], source: str, tensors: Mapping[str, TensorSpec], in_turns: bool) -> Iterator[OpNode]:
    """The nodes that give each linear's own result back, as views."""
    start = 0
    for number, node in enumerate(members):
        width = tensors[node.outputs[0]].shape[-1]
        bounds = (number, 2 * width, 2) if in_turns else (start, start + width, 1)
        attrs = dict(zip(("dim", "start", "end", "step"), (-1, *bounds), strict=True))
        yield OpNode(f"{node.name} of {source}", spelled(slice_), {"self": source}, attrs, node.outputs)
        start += width
