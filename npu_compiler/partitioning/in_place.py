"""In-place ops of a model that is divided: made pure where that is possible, kept together where it is not.

An in-place op is pure once whoever reads the changed tensor later reads the op's result instead. That does not hold for
memory that is also read through another view: then all nodes that share the memory form a chain, which runs on the CPU
as PyTorch runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from npu_compiler.errors import IRError
from npu_compiler.ir import IRGraph, OpNode, Renaming
from npu_compiler.ops.indexing import picked
from npu_compiler.ops.registry import is_in_place, traits_of
from npu_compiler.ops.traits import Memory

__all__ = ["Chain", "find_chains", "rename_changed"]


@dataclass(frozen=True, slots=True)
class Chain:
    """A run of nodes, from `first` to `last` in the graph's order, that must stay together; `op` changes its memory."""

    first: int
    last: int
    op: OpNode


def find_chains(graph: IRGraph) -> tuple[Chain, ...]:
    """The runs of nodes that read memory through one view after an in-place op changed it through another.

    A chain holds everything that touches its memory, so that what leaves it is the memory's last state.

    Args:
        graph: What `rename_changed` gave.

    Raises:
        IRError: An output of the model is an input or a weight that was changed through a view.
    """
    roots = _roots(graph)
    changed: dict[str, OpNode] = {}  # by root: the last op that changed it
    fresh: dict[str, set[str]] = {}  # by root: the names under which its present state is known
    stale: dict[str, OpNode] = {}  # by root: an op after which the memory was read under an older name
    for node in graph.nodes:
        _note_stale(node.tensors(), roots, changed, fresh, stale)
        target = next(node.tensors(), None)
        if target is not None and is_in_place(node.op) and node.outputs:
            changed[roots[target]] = node
            fresh[roots[target]] = {node.outputs[0]}
        else:
            for name in node.outputs:
                if roots[name] in changed:
                    fresh[roots[name]].add(name)
    _note_stale(graph.outputs, roots, changed, fresh, stale)
    outer = {*graph.inputs, *graph.weights}
    for name in graph.outputs:
        if name in outer and name in stale:
            raise IRError(
                f"the output '{name}' is an input or a weight that '{stale[name].name}' changes in place through a "
                "view; extract the model with npu_compiler.extract, which writes such changes as pure operations"
            )
    spans = _spans(graph, roots)
    return _merged(Chain(*spans[root], op) for root, op in stale.items())


def _note_stale(
    names: Iterable[str],
    roots: Mapping[str, str],
    changed: Mapping[str, OpNode],
    fresh: Mapping[str, set[str]],
    stale: dict[str, OpNode],
) -> None:
    for name in names:
        root = roots[name]
        if root in changed and name not in fresh[root]:
            stale[root] = changed[root]


def _spans(graph: IRGraph, roots: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """The first and the last node that touch the memory of each root."""
    spans: dict[str, tuple[int, int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in (*node.tensors(), *node.outputs):
            spans[roots[name]] = (spans.get(roots[name], (position,))[0], position)
    return spans


def _roots(graph: IRGraph) -> dict[str, str]:
    """For each tensor the one that owns its memory."""
    roots = {name: name for name in (*graph.inputs, *graph.weights)}
    for node in graph.nodes:
        may_share = traits_of(node.op).memory is not Memory.OWN or is_in_place(node.op)
        source = _source(node) if may_share else None
        for name in node.outputs:
            roots[name] = name if source is None else roots[source]
    return roots


def _source(node: OpNode) -> str | None:
    """The tensor whose memory a view or an in-place op gives back."""
    return picked(node) if traits_of(node.op).picks else next(node.tensors(), None)


def _merged(chains: Iterable[Chain]) -> tuple[Chain, ...]:
    """Chains that overlap become one."""
    merged: list[Chain] = []
    for chain in sorted(chains, key=lambda chain: chain.first):
        if merged and chain.first <= merged[-1].last:
            merged[-1] = replace(merged[-1], last=max(merged[-1].last, chain.last))
        else:
            merged.append(chain)
    return tuple(merged)


def rename_changed(graph: IRGraph) -> IRGraph:
    """The graph in which whoever reads a tensor after an in-place op changed it reads the op's result.

    Right outside of chains; inside them it changes nothing, because there the result is the changed memory itself.
    """
    names = Renaming()
    nodes = []
    for node in graph.nodes:
        node = names.apply(node)
        nodes.append(node)
        target = next(node.tensors(), None)
        if target is not None and is_in_place(node.op) and node.outputs:
            names.add(target, node.outputs[0])
    outputs = tuple(map(names.current, graph.outputs))
    return replace(graph, nodes=tuple(nodes), outputs=outputs)
