"""Rewrites written as equations: calling one with symbols gives the pattern, with tensors the reference of its test.

An equation is a function of a namespace of operations and of its variables. `find` matches what it computes against a
graph, from the result backwards. Sums and products match in either order, and a value inside of the pattern may have no
reader outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.registry import terms, traits_of

__all__ = ["Match", "Pattern", "PatternOps", "find", "pattern"]

Value = str | float | int
"""What a variable stands for: the name of a tensor, or a number."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A variable of an equation."""

    name: str


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of an equation on variables or further operations; ops say by their `Term` which they are."""

    name: str
    operands: tuple[Variable | Operation, ...]


class PatternOps:
    """The namespace that turns an equation into a pattern."""

    def __getattr__(self, name: str) -> Callable[..., Operation]:
        if name not in terms():
            raise AttributeError(f"equations know {', '.join(terms())}, not '{name}'")
        return lambda *operands: Operation(name, operands)


@dataclass(frozen=True)
class Pattern:
    """An equation as something to look for.

    Attributes:
        name: What it is called in messages.
        result: Its last operation.
        variables: Names of its variables.
    """

    name: str
    result: Operation
    variables: tuple[str, ...]


@dataclass
class Match:
    """A place in a graph that an equation describes.

    Attributes:
        root: The node that makes the result.
        nodes: All nodes of the pattern, `root` included.
        values: What each variable stands for.
    """

    root: OpNode
    nodes: list[OpNode] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)


def pattern(name: str, equation: Callable[..., Operation], variables: Sequence[str], **options: Any) -> Pattern:
    """Traces an equation into a pattern."""
    result = equation(PatternOps(), *(Variable(v) for v in variables), **options)
    return Pattern(name, result, tuple(variables))


def find(graph: IRGraph, patterns: Sequence[Pattern]) -> Iterator[tuple[Pattern, Match | str]]:
    """Every place where one of the patterns describes the graph: the first of them that does, and where.

    Where only a reader outside of the pattern is in the way, the reason stands in place of the match.
    """
    producers, users = graph.producers(), graph.users()
    for node in graph.nodes:
        found = _first_match(patterns, node, graph, producers)
        if found is None:
            continue
        sought, match = found
        inside = {id(n) for n in match.nodes}
        outside = [
            f"'{name}' is also read by '{user.name}'" if user else f"'{name}' is an output"
            for inner in match.nodes
            if inner is not node
            for name in inner.outputs
            for user in [*(u for u in users.get(name, []) if id(u) not in inside), *_if_output(name, graph)]
        ]
        yield sought, f"'{node.name}' is not rewritten as {sought.name}: {outside[0]}" if outside else match


def _first_match(
    patterns: Sequence[Pattern], node: OpNode, graph: IRGraph, producers: Mapping[str, OpNode]
) -> tuple[Pattern, Match] | None:
    for sought in patterns:
        match = Match(node)
        if _matches(sought.result, node, match, graph, producers):
            return sought, match
    return None


def _if_output(name: str, graph: IRGraph) -> Sequence[None]:
    return [None] if name in graph.outputs else []


def _matches(sought: Operation, node: OpNode, match: Match, graph: IRGraph, producers: Mapping[str, OpNode]) -> bool:
    """Matches one operation at a node, and its operands at theirs; extends `match` only where all of it fits."""
    term = traits_of(node.op).term
    if term is None or term.name != sought.name or len(node.outputs) != 1 or not term.holds(node, graph):
        return False
    given = [node.inputs.get(p, node.attrs.get(p)) for p in term.parameters]
    orders = [given, given[::-1]] if term.commutes and len(given) == 2 else [given]
    for order in orders:
        trial = Match(match.root, [*match.nodes, node], dict(match.values))
        if all(_operand(s, value, trial, graph, producers) for s, value in zip(sought.operands, order, strict=True)):
            match.nodes, match.values = trial.nodes, trial.values
            return True
    return False


def _operand(
    sought: Variable | Operation, value: Any, match: Match, graph: IRGraph, producers: Mapping[str, OpNode]
) -> bool:
    if isinstance(sought, Variable):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return False
        return match.values.setdefault(sought.name, value) == value
    producer = producers.get(value) if isinstance(value, str) else None
    return producer is not None and _matches(sought, producer, match, graph, producers)
