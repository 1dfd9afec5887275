"""Selection pushdown: rows of which no result is read are not computed.

`take(f(x), rows)` becomes `f(take(x, rows))` wherever `f` computes each row from that row alone. In the last layer of a
language model, of which one token's logits are read, that is everything after the keys and values. The graph is walked
from its outputs backwards to find what is read of each tensor: all of it, or the same rows by every reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from npu_compiler.graph.coded_linears import ways_to_merge_linears
from npu_compiler.graph.rewrite import Scene, sites, without_dead_nodes
from npu_compiler.graph.row_selection import selection_of, taking
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import spelled, traits_of
from npu_compiler.ops.rows import MALFORMED, Passage, RowCall, Rows, Selection
from npu_compiler.ops.traits import Work
from npu_compiler.ops.views import reshape

__all__ = ["push_down_selections"]

_HEAVY = (Work.ANCHOR, Work.ROWS)
_CHEAP = (Work.ELEMENTWISE, Work.VIEW)


@dataclass(frozen=True)
class _Part:
    """What is read of a tensor: the positions `rows` along the dimension `dim`, and all of the other dimensions."""

    dim: int
    rows: Rows


@dataclass
class _Demand:
    """What a graph reads of its tensors.

    Attributes:
        read: By tensor, the part of it that is read; None where all of it is.
        small: By node, how it makes only the part of its results that is read; other nodes make all of theirs.
    """

    read: dict[str, _Part | None] = field(default_factory=dict)
    small: dict[str, Passage] = field(default_factory=dict)

    def ask(self, names: Iterable[str], part: _Part | None) -> None:
        """Notes that a part of some tensors is read; one that is read in two different parts is made whole."""
        for name in names:
            self.read[name] = part if self.read.get(name, part) == part else None


def push_down_selections(graph: IRGraph, launch_flops: int) -> IRGraph:
    """Moves selections of rows ahead of the nodes of which no other rows are read.

    A selection moves only if a product, a norm or a sum becomes smaller by it: elementwise work alone costs nothing in
    the epilogue of what is computed whole. Of linears that share their input, and so become one product, one that
    makes only some rows leaves the product only if that saves more arithmetic than one more launch takes.

    Args:
        graph: Any graph.
        launch_flops: Arithmetic that takes as long as one more small launch.
    """
    while (smaller := _with_parts(graph, launch_flops)) is not None:
        graph = smaller  # this ends: each time some product, norm or sum is at most half of what it was
    return graph


def _with_parts(graph: IRGraph, launch_flops: int) -> IRGraph | None:
    """The graph with every selection moved ahead as far as possible; None where none can move."""
    selections = {node.name: found for node in graph.nodes if (found := selection_of(node, graph)) is not None}
    whole: set[str] = set()
    users = graph.users() if selections else {}
    while selections and (demand := _demand(graph, selections, whole)).small:
        unworthy = {
            *_without_work(graph, demand),
            *_epilogues(graph, users, demand),
            *_better_merged(graph, demand, launch_flops),
        }
        if not unworthy:
            return _rewritten(graph, selections, demand)
        whole |= unworthy
    return None


def _demand(graph: IRGraph, selections: Mapping[str, Selection], whole: set[str]) -> _Demand:
    """What is read of each tensor, if the nodes named in `whole` compute all rows of their results."""
    demand = _Demand()
    demand.ask(graph.outputs, None)
    for node in reversed(graph.nodes):
        asked = [demand.read[name] for name in node.outputs if name in demand.read]
        if not asked:
            continue
        part = asked[0] if all(other == asked[0] for other in asked) and node.name not in whole else None
        found = passage(node, graph.tensors, part.dim, part.rows) if part is not None else None
        if part is not None and found is not None:
            demand.small[node.name] = found
            for names, dim in _operands(node, found):
                demand.ask(names, None if dim is None else _Part(dim, part.rows))
            continue
        demand.ask((name for name in node.outputs if name in demand.read), None)
        selection = selections.get(node.name)
        if selection is not None:
            demand.ask([selection.source], _Part(selection.dim, selection.rows))
        demand.ask((name for name in node.tensors() if selection is None or name != selection.source), None)
    demand.ask((*graph.inputs, *graph.weights), None)
    return demand


def _operands(node: OpNode, found: Passage) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """For each parameter of a small node its tensors, and the dimension along which only the wanted rows are read."""
    for parameter, value in node.inputs.items():
        if found.op is None or parameter == "self":
            names = (value,) if isinstance(value, str) else value
            yield names if found.item is None else (names[found.item],), found.dims.get(parameter)


def passage(node: OpNode, tensors: Mapping[str, TensorSpec], dim: int, rows: Rows) -> Passage | None:
    """How a node gives only `rows` of dimension `dim` of its results.

    Args:
        node: It reads something and makes something.
        tensors: Those that it reads and makes, whole.
        dim: Counted from the front.
        rows: Fewer than all.

    Returns:
        None where it cannot, or its op does not say how.
    """
    rule = traits_of(node.op).rows
    if rule is None or any(0 in tensors[name].shape for name in (*node.tensors(), *node.outputs)):
        return None
    try:
        found = rule(RowCall(node, tensors, dim, rows))
    except MALFORMED:
        return None
    return found if found is not None and _names_rows(found, node, tensors, rows) else None


def _names_rows(found: Passage, node: OpNode, tensors: Mapping[str, TensorSpec], rows: Rows) -> bool:
    """Whether each dimension that a rule names exists, and has as many positions as there are rows in all."""
    for parameter, dim in found.dims.items():
        value = node.inputs[parameter]
        shapes = [tensors[name].shape for name in ((value,) if isinstance(value, str) else value)]
        if not all(0 <= dim < len(shape) and shape[dim] == rows.size for shape in shapes):
            return False
    return True


def _work(node: OpNode) -> Work:
    return traits_of(node.op).work


def _without_work(graph: IRGraph, demand: _Demand) -> Iterator[str]:
    """Small nodes whose connected small nodes, themselves included, have no product, norm or sum among them."""
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while roots.setdefault(name, name) != name:
            roots[name] = roots[roots[name]]
            name = roots[name]
        return name

    small = [node for node in graph.nodes if node.name in demand.small]
    for node in small:
        for names, dim in _operands(node, demand.small[node.name]):
            for name in (*names, *node.outputs):
                if dim is not None and demand.read.get(name) is not None:
                    roots[root(name)] = root(node.outputs[0])
    worthy = {root(node.outputs[0]) for node in small if _work(node) in _HEAVY}
    yield from (node.name for node in small if root(node.outputs[0]) not in worthy)


def _epilogues(graph: IRGraph, users: Mapping[str, list[OpNode]], demand: _Demand) -> Iterator[str]:
    """Small elementwise nodes and views that could be the epilogue of a product which computes all rows.

    They are the only readers of its result, and computing all rows there costs nothing.
    """
    done: set[str] = set()  # tensors that hold the result of a small product, or of what follows one
    whole = (node for node in graph.nodes if _work(node) is Work.ANCHOR and node.name not in demand.small)
    ends = {name for node in whole for name in node.outputs}
    for node in graph.nodes:
        found = demand.small.get(node.name)
        if found is None:
            continue
        operands = list(node.tensors())
        if _work(node) in _HEAVY or done.intersection(operands):
            done.update(node.outputs)
        elif _work(node) in _CHEAP and any(
            name in ends and users[name] == [node] and name not in graph.outputs for name in operands
        ):
            ends.update(node.outputs)
            yield node.name


def _better_merged(graph: IRGraph, demand: _Demand, launch_flops: int) -> Iterator[str]:
    """Small linears that are better computed whole, in one product with the other linears of the same input."""
    scene = Scene(graph)
    for site in (site for rule in ways_to_merge_linears() for site in sites(scene, rule)):
        members = [match.root for match in site]
        small = [node for node in members if node.name in demand.small]
        saved = sum(_saved(node, graph.tensors, demand) for node in small)
        if len(small) < len(members) and saved < launch_flops:
            yield from (node.name for node in small)


def _saved(linear: OpNode, tensors: Mapping[str, TensorSpec], demand: _Demand) -> int:
    """The arithmetic that a linear saves if it computes only the rows that are read."""
    part = demand.read[linear.outputs[0]]
    assert part is not None
    per_row = 2 * prod(tensors[linear.outputs[0]].shape) * tensors[str(linear.inputs["input"])].shape[-1]
    return per_row * (part.rows.size - part.rows.count) // part.rows.size


def _rewritten(graph: IRGraph, selections: Mapping[str, Selection], demand: _Demand) -> IRGraph:
    """The graph in which small nodes make only what is read of their results, under the same names."""
    writer = _Writer(graph, demand)
    for node in graph.nodes:
        selection = selections.get(node.name)
        if node.name in demand.small:
            writer.add_small(node)
        elif selection is not None and demand.read.get(selection.source) is not None:
            shape = {"shape": list(graph.tensors[node.outputs[0]].shape)}
            taken = replace(node, op=spelled(reshape), inputs={"self": selection.source}, attrs=shape)
            writer.nodes.append(taken)
        else:
            writer.nodes.append(node)
    return without_dead_nodes(replace(graph, nodes=_in_order(writer.nodes), tensors=writer.tensors))


class _Writer:
    """Writes the nodes of the new graph, with a selection wherever a small node reads rows of a whole tensor."""

    def __init__(self, graph: IRGraph, demand: _Demand) -> None:
        self.nodes: list[OpNode] = []
        self.tensors = dict(graph.tensors)
        self._shapes, self._demand = graph.tensors, demand

    def add_small(self, node: OpNode) -> None:
        """Adds the node that makes only the wanted part of its results."""
        found = self._demand.small[node.name]
        part = next(p for name in node.outputs if (p := self._demand.read.get(name)) is not None)
        inputs: dict[str, str | tuple[str, ...]] = {}
        for parameter, value in node.inputs.items():
            if found.op is None or parameter == "self":
                inputs[parameter] = self._operand(value, found, found.dims.get(parameter), part.rows)
        attrs = found.attrs if found.op else {**node.attrs, **found.attrs}
        self.nodes.append(replace(node, op=found.op or node.op, inputs=inputs, attrs=attrs))
        self.tensors.update({name: self._resized(name, part, name) for name in node.outputs})

    def _operand(
        self, value: str | tuple[str, ...], found: Passage, dim: int | None, rows: Rows
    ) -> str | tuple[str, ...]:
        if dim is None:
            return value
        if isinstance(value, str):
            return self._part(value, _Part(dim, rows))
        part = _Part(dim, rows)
        return tuple(self._part(name, part) if found.item in (None, i) else name for i, name in enumerate(value))

    def _part(self, name: str, part: _Part) -> str:
        """The name of the tensor with a part of `name`: `name` itself if only that part is made, else a selection."""
        if self._demand.read[name] is not None:
            return name
        known = part.rows.known
        which = part.rows.index if known is None else f"{known.start}:{known[-1] + 1}:{known.step}"
        output = f"{name}[{which} of dimension {part.dim}]"
        if output not in self.tensors:
            self.tensors[output] = self._resized(name, part, output)
            self.nodes.append(taking(Selection(name, part.dim, part.rows), output))
        return output

    def _resized(self, name: str, part: _Part, output: str) -> TensorSpec:
        spec = self._shapes[name]
        return TensorSpec(output, (*spec.shape[: part.dim], part.rows.count, *spec.shape[part.dim + 1 :]), spec.dtype)


def _in_order(nodes: Sequence[OpNode]) -> tuple[OpNode, ...]:
    """The same nodes, each after those that make its operands: a selection that moved ahead needs its index there."""
    producers = {name: node for node in nodes for name in node.outputs}
    ordered: dict[str, OpNode] = {}
    for node in nodes:
        waiting = [node]
        while waiting:
            missing = [producers[name] for name in waiting[-1].tensors() if name in producers]
            missing = [other for other in missing if other.name not in ordered]
            if missing:
                waiting.extend(missing)
            else:
                last = waiting.pop()
                ordered.setdefault(last.name, last)
    return tuple(ordered.values())
