"""Passes over the graph: each takes a verified graph and gives one that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import partial

from npu_compiler.asked_rows import compute_asked_rows
from npu_compiler.dtypes import FLOAT32, DType
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.fusion_patterns import fuse_attention, merge_linears, share_heads
from npu_compiler.ir import IRGraph, OpNode, Renaming, TensorSpec
from npu_compiler.layout import BufferSpec, dense
from npu_compiler.linear_spelling import spell_linears
from npu_compiler.ops.indexing import picked
from npu_compiler.ops.registry import is_in_place, traits_of
from npu_compiler.ops.traits import Channels, Memory
from npu_compiler.recipes import WeightRecipe

__all__ = ["assign_dtypes", "eliminate_noops", "fold_batch_norms", "functionalize", "optimize"]

Pass = Callable[[IRGraph], IRGraph]


def optimize(graph: IRGraph, pairs_columns: bool = False, launch_flops: int = 0) -> IRGraph:
    """Runs all passes in order; the graph is verified after each.

    Args:
        graph: A graph as it was read.
        pairs_columns: Whether the target's epilogues can combine two neighbouring columns of a product.
        launch_flops: Arithmetic that takes the target as long as one more small launch.
    """
    passes: tuple[Pass, ...] = (
        functionalize,
        eliminate_noops,
        spell_linears,
        fold_batch_norms,
        fuse_attention,
        share_heads,
        partial(compute_asked_rows, launch_flops=launch_flops),
        partial(merge_linears, interleave=pairs_columns),
    )
    for run in passes:
        graph = run(graph).verify()
    return graph


def functionalize(graph: IRGraph) -> IRGraph:
    """Turns in-place ops into ordinary ones: whoever reads the changed tensor later reads the result instead.

    Raises:
        UnsupportedOpError: Another view of the changed memory is read later, which would have to change with it.
    """
    names = Renaming()
    bases: dict[str, str] = {}  # tensor to the one whose memory it views
    views: dict[str, list[str]] = {}  # by the one whose memory it is: its views, but for those that are stale
    stale: dict[str, OpNode] = {}  # tensors whose memory an in-place op changed under them
    nodes = []
    for node in graph.nodes:
        node = names.apply(node)
        _refuse_stale(stale, node.tensors(), f"'{node.name}' reads later")
        nodes.append(node)
        source = next(node.tensors(), None)
        if source is not None and _may_share_memory(node, graph.tensors):
            bases.update(dict.fromkeys(node.outputs, bases.get(source, source)))
            views.setdefault(bases.get(source, source), []).extend(node.outputs)
        if is_in_place(node.op) and source is not None:
            root = bases.get(source, source)
            current = (source, *node.outputs)
            same_memory = (root, *views.get(root, ()))
            stale.update({name: node for name in same_memory if name not in current})
            views[root] = [name for name in same_memory if name in current]
            names.add(source, node.outputs[0])
    outputs = tuple(map(names.current, graph.outputs))
    _refuse_stale(stale, outputs, "the graph gives as an output")
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _refuse_stale(stale: Mapping[str, OpNode], names: Iterable[str], use: str) -> None:
    for name in names:
        if name in stale:
            changed = stale[name]
            reason = f"it changes memory in place that {use} through another view"
            raise UnsupportedOpError(changed.name, changed.op, reason)


def _may_share_memory(node: OpNode, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a node's results may be views of its first operand."""
    memory = traits_of(node.op).memory
    if memory is Memory.OPERAND_OF_SAME_DTYPE:
        return tensors[next(node.tensors())].dtype == tensors[node.outputs[0]].dtype
    return memory is Memory.OPERAND


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
    source = next(node.tensors(), None)
    if source is None or not known.keeps_order:
        return None
    given, made = tensors[source], tensors[node.outputs[0]]
    return source if (given.shape, given.dtype) == (made.shape, made.dtype) else None


def fold_batch_norms(graph: IRGraph) -> IRGraph:
    """``batch_norm(conv(x, w) + b)`` becomes ``conv(x, w * s) + b'``, where s and b' are made when weights are loaded.

    A BatchNorm stays as it is where the convolution's result has another reader, or where a tensor it would fold is not
    a weight.
    """
    producers, users = graph.producers(), graph.users()
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    folded: dict[str, OpNode] = {}  # by the name of the BatchNorm's node
    dropped: set[str] = set()
    for norm in graph.nodes:
        convolution = _foldable(norm, graph, producers, users)
        if convolution is None:
            continue
        weight, bias = f"{norm.outputs[0]}.weight", f"{norm.outputs[0]}.bias"
        _add_folded(convolution, norm, weight, bias, tensors, weights)
        folded[norm.name] = replace(
            convolution,
            name=f"{convolution.name} + {norm.name}",
            inputs={"input": convolution.inputs["input"], "weight": weight, "bias": bias},
            outputs=norm.outputs,
        )
        dropped.add(convolution.name)
    nodes = tuple(folded.get(node.name, node) for node in graph.nodes if node.name not in dropped)
    read = {name for node in nodes for name in node.tensors()} | set(graph.outputs)
    return replace(graph, nodes=nodes, tensors=tensors, weights={k: v for k, v in weights.items() if k in read})


def _foldable(
    norm: OpNode, graph: IRGraph, producers: Mapping[str, OpNode], users: Mapping[str, list[OpNode]]
) -> OpNode | None:
    """The convolution that a BatchNorm can be folded into."""
    if traits_of(norm.op).channels is not Channels.SCALED or len(norm.outputs) != 1:
        return None
    source = norm.inputs["input"]
    convolution = producers.get(source) if isinstance(source, str) else None
    if convolution is None or traits_of(convolution.op).channels is not Channels.MADE or norm.attrs.get("training"):
        return None
    if len(users[convolution.outputs[0]]) > 1 or convolution.outputs[0] in graph.outputs:
        return None
    statistics = [value for key, value in norm.inputs.items() if key != "input"]
    parameters = [value for key, value in convolution.inputs.items() if key != "input"]
    plain = all(
        isinstance(n, str) and n in graph.weights and graph.weights[n].is_plain for n in statistics + parameters
    )
    fits = _fits(norm, convolution, graph.tensors) and type(norm.attrs.get("eps", 1e-5)) in (int, float)
    only_shift = "bias" in norm.inputs and "weight" not in norm.inputs  # no recipe takes one without the other
    tracked = "running_mean" in norm.inputs and "running_var" in norm.inputs
    return convolution if plain and tracked and fits and not only_shift else None


def _fits(norm: OpNode, convolution: OpNode, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether each parameter has one value for every output of the convolution; where not, its definition says so."""
    weight = tensors[str(convolution.inputs["weight"])].shape
    by_channel = [value for key, value in norm.inputs.items() if key != "input"]
    by_channel += [value for key, value in convolution.inputs.items() if key == "bias"]
    return len(weight) == 4 and all(tensors[str(name)].shape == weight[:1] for name in by_channel)


def _add_folded(
    convolution: OpNode,
    norm: OpNode,
    weight: str,
    bias: str,
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightRecipe],
) -> None:
    """Declares the folded weight and bias, with the recipes that make them."""
    given = {key: value for key, value in norm.inputs.items() if isinstance(value, str)}
    own = {key: value for key, value in convolution.inputs.items() if isinstance(value, str)}
    eps = (("eps", float(norm.attrs.get("eps", 1e-5))),)
    affine = [given[key] for key in ("weight", "bias") if key in given]
    shape, kind = tensors[own["weight"]].shape, tensors[own["weight"]].dtype

    def declare(name: str, size: tuple[int, ...], sources: list[str], transform: str) -> None:
        tensors[name] = TensorSpec(name, size, kind)
        inputs = tuple(weights[source].inputs[0] for source in sources)
        weights[name] = WeightRecipe(BufferSpec(name, kind, kind, dense(size)), inputs, transform, eps)

    declare(weight, shape, [own["weight"], given["running_var"], *affine[:1]], "fold_weight")
    statistics = [given["running_mean"], given["running_var"], *affine]
    if "bias" in own:
        declare(bias, shape[:1], [own["bias"], *statistics], "fold_given_bias")
    else:
        declare(bias, shape[:1], statistics, "fold_bias")


def assign_dtypes(graph: IRGraph, compute: DType) -> IRGraph:
    """Stores a float32 model in the compute dtype, but for what has to stay exact: the angles of sines and cosines.

    A model whose weights are of a half precision already says itself what is float32 on purpose, and stays as it is; so
    does a part of a model, which is written in the data types of the device.
    """
    if graph.compute_dtype is not None or any(graph.tensors[name].dtype == compute for name in graph.weights):
        return graph
    exact: set[str] = set()
    for node in reversed(graph.nodes):
        known = traits_of(node.op)
        if known.takes_angle or (exact.intersection(node.outputs) and not known.is_learned):
            exact.update(node.tensors())
        if known.is_learned:
            exact.difference_update(node.outputs)
    tensors = {
        name: replace(spec, dtype=compute) if spec.dtype == FLOAT32 and name not in exact else spec
        for name, spec in graph.tensors.items()
    }
    return replace(graph, tensors=tensors)
