"""The one rewriting engine. A rule is an equation, and a function that gives what replaces a match of it.

An equation is a function of a namespace of operations and of its variables: called with symbols it gives the pattern,
called with tensors the reference of its test. `find` matches what it computes against a graph, from the result
backwards. Sums and products match in either order. A value inside of a pattern may have no reader outside of it, unless
the equation calls it shared. Where only that, or a rule's own condition, is in the way, `apply` notes it in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from itertools import chain
from operator import itemgetter
from typing import Any

from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import terms, traits_of

__all__ = ["Match", "Pattern", "PatternOps", "Replacement", "Rule", "Scene", "apply", "find", "pattern", "sites"]
__all__ += ["without_dead_nodes"]

Value = str | float | int
"""What a variable stands for: the name of a tensor, or a number."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A variable of an equation; an optional one also stands for an operand that is absent."""

    name: str
    is_optional: bool = False


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of an equation on variables or further operations; ops say by their `Term` which they are."""

    name: str
    operands: tuple[Variable | Operation, ...]
    is_shared: bool = False


class PatternOps:
    """The namespace that turns an equation into a pattern."""

    def __getattr__(self, name: str) -> Callable[..., Operation]:
        if name not in terms():
            raise AttributeError(f"equations know {', '.join(terms())}, not '{name}'")
        return lambda *operands: Operation(name, operands)

    def shared(self, value: Operation) -> Operation:
        """A value that others may read too: it stays for them."""
        return replace(value, is_shared=True)


@dataclass(frozen=True)
class Pattern:
    """An equation as something to look for.

    Attributes:
        result: Its last operation.
        form: The options with which the equation was called.
    """

    result: Operation
    form: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Match:
    """A place in a graph that an equation describes.

    Attributes:
        root: The node that makes the result.
        nodes: All nodes of the pattern that are its own, `root` first.
        values: What each variable stands for; an absent operand has none.
        form: As in `Pattern`.
        shared: The nodes of the pattern whose results others may read.
    """

    root: OpNode
    nodes: list[OpNode] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)
    shared: list[OpNode] = field(default_factory=list)

    def names(self, *variables: str) -> list[str] | None:
        """The tensors that variables stand for, those of absent operands left out; None where one is a number."""
        found = [self.values[variable] for variable in variables if variable in self.values]
        names = [value for value in found if isinstance(value, str)]
        return names if len(names) == len(found) else None


@dataclass(frozen=True)
class Scene:
    """A graph in which rules look for their places."""

    graph: IRGraph

    @cached_property
    def users(self) -> dict[str, list[OpNode]]:
        return self.graph.users()

    @cached_property
    def producers(self) -> dict[str, OpNode]:
        return self.graph.producers()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.tensors[name].shape


@dataclass(frozen=True)
class Replacement:
    """What stands in place of a match.

    Attributes:
        nodes: Nodes that make all that its nodes made for others.
        tensors, weights: What these need declared.
    """

    nodes: tuple[OpNode, ...]
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    weights: Mapping[str, WeightRecipe] = field(default_factory=dict)


def _alone(match: Match, scene: Scene) -> Hashable:
    return match.root.name


def _nothing(match: Match, scene: Scene) -> str:
    return ""


@dataclass(frozen=True)
class Rule:
    """A rewrite.

    Attributes:
        name: What it makes, for notes.
        patterns: Equations for what it replaces, of which the first that matches counts.
        replacement: What takes the place of the matches of a site; or why nothing does, for a note; or an empty text
            where that needs no note.
        key: Matches of one key are one site, which is replaced as a whole: by itself each match is one. None for a
            match of no site.
        least: Matches that a site needs.
        obstacle: Why a match cannot be part of a site that it would belong to by its key; empty where it can.
    """

    name: str
    patterns: tuple[Pattern, ...]
    replacement: Callable[[Sequence[Match], Scene], Replacement | str]
    key: Callable[[Match, Scene], Hashable] = _alone
    least: int = 1
    obstacle: Callable[[Match, Scene], str] = _nothing


def pattern(equation: Callable[..., Operation], optional: Sequence[str] = (), **form: Any) -> Pattern:
    """Traces an equation into a pattern.

    Args:
        equation: It takes a namespace of operations, then its variables, which go by the names of its parameters.
        optional: The variables that may be absent.
        form: Options of the equation, which it takes by name alone.
    """
    _, *variables = (each.name for each in signature(equation).parameters.values() if each.kind != each.KEYWORD_ONLY)
    return Pattern(equation(PatternOps(), *(Variable(v, v in optional) for v in variables), **form), form)


def apply(graph: IRGraph, rule: Rule) -> IRGraph:
    """The graph with a rule's replacement in place of each of its sites; why a near miss stays goes to the notes."""
    scene = Scene(graph)
    notes: list[str] = []
    made: dict[str, Replacement] = {}  # by the name of the node in whose place it stands
    gone: set[str] = set()
    for site in sites(scene, rule, notes):
        taken = [node.name for match in site for node in match.nodes]
        if not gone.isdisjoint(taken):
            continue  # part of what another place replaces
        result = rule.replacement(site, scene)
        outside = next((reader for match in site for reader in _read_outside(match, scene)), "")
        if isinstance(result, str) or outside:
            reason = result if isinstance(result, str) else outside
            notes += [_note(site[0], rule, reason)] if reason else []
            continue
        gone.update(taken)
        made[site[0].root.name] = result
    graph = replace(graph, notes=(*graph.notes, *notes)) if notes else graph
    return _rewritten(graph, made, gone) if made else graph


def _rewritten(graph: IRGraph, made: Mapping[str, Replacement], gone: Collection[str]) -> IRGraph:
    """The graph with replacements in the place of nodes, and without the nodes that are gone."""
    nodes: list[OpNode] = []
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    for node in graph.nodes:
        if node.name in made:
            result = made[node.name]
            nodes += result.nodes
            tensors |= result.tensors
            weights |= result.weights
        elif node.name not in gone:
            nodes.append(node)
    smaller = without_dead_nodes(replace(graph, nodes=tuple(nodes), tensors=tensors))
    read = {name for node in smaller.nodes for name in node.tensors()} | set(graph.outputs)
    return replace(smaller, weights={name: recipe for name, recipe in weights.items() if name in read})


def _note(match: Match, rule: Rule, reason: str) -> str:
    return f"'{match.root.name}' is not rewritten as {rule.name}: {reason}"


def sites(scene: Scene, rule: Rule, notes: list[str] | None = None) -> list[list[Match]]:
    """The places where a rule may hold, each as its matches in the graph's order.

    Of places that overlap, the one that ends later comes first: it may contain the other. Of a place that lacks matches
    for an obstacle of theirs, that is added to `notes`.
    """
    found: dict[Hashable, list[Match]] = {}
    for match in find(scene, rule.patterns):
        key = rule.key(match, scene)
        if key is not None:
            found.setdefault(key, []).append(match)
    result = []
    for members in reversed(found.values()):
        obstacles = [rule.obstacle(match, scene) for match in members] if len(members) >= rule.least else []
        site = [match for match, obstacle in zip(members, obstacles, strict=False) if not obstacle]
        if notes is not None:
            notes += [_note(match, rule, o) for match, o in zip(members, obstacles, strict=False) if o]
        if len(site) >= rule.least:
            result.append(site)
    return result


def _read_outside(match: Match, scene: Scene) -> Iterator[str]:
    """Why a match cannot be replaced: each reader, not a part of it, of a value that would be gone, in words."""
    inside = {node.name for node in (*match.nodes, *match.shared)}
    for inner in match.nodes[1:]:
        for name in inner.outputs:
            yield from (
                f"'{name}' is also read by '{u.name}'" for u in scene.users.get(name, []) if u.name not in inside
            )
            if name in scene.graph.outputs:
                yield f"'{name}' is an output"


def find(scene: Scene, patterns: Sequence[Pattern]) -> Iterator[Match]:
    """The matches in a graph; of several patterns that describe one place, that of the first."""
    ending: dict[str, list[Pattern]] = {}
    for sought in patterns:
        ending.setdefault(sought.result.name, []).append(sought)
    terms_of = {op: traits_of(op).term for op in scene.graph.nodes_by_op}
    sought_by_op = {op: ending.get(term.name, []) for op, term in terms_of.items() if term is not None}
    possible = (scene.graph.nodes_by_op[op] for op, patterns in sought_by_op.items() if patterns)
    for _, node in sorted(chain.from_iterable(possible), key=itemgetter(0)):
        for sought in sought_by_op[node.op]:
            match = Match(node, form=sought.form)
            if _matches(sought.result, node, match, scene):
                yield match
                break


def _matches(sought: Operation, node: OpNode, match: Match, scene: Scene) -> bool:
    """Whether `node` is the operation `sought`, and its operands are those of `sought`; extends `match` if so."""
    term = traits_of(node.op).term
    if term is None or term.name != sought.name or len(node.outputs) != 1 or not term.holds(node, scene.graph):
        return False
    named = [node.inputs.get(p, node.attrs.get(p)) for p in term.parameters]
    given = [value for each in named for value in (each if isinstance(each, tuple) else (each,))]
    if any(value is not None for value in given[len(sought.operands) :]):
        return False
    given = given[: len(sought.operands)]
    orders = [given, given[::-1]] if term.commutes and len(given) == 2 else [given]
    for order in orders:
        trial = Match(match.root, [*match.nodes], dict(match.values), match.form, [*match.shared])
        (trial.shared if sought.is_shared else trial.nodes).append(node)
        if all(_operand(s, value, trial, scene) for s, value in zip(sought.operands, order, strict=True)):
            match.nodes, match.values, match.shared = trial.nodes, trial.values, trial.shared
            return True
    return False


def _operand(sought: Variable | Operation, value: Any, match: Match, scene: Scene) -> bool:
    if isinstance(sought, Variable):
        if value is None and sought.is_optional:
            return True
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return False
        return match.values.setdefault(sought.name, value) == value
    producer = scene.producers.get(value) if isinstance(value, str) else None
    return producer is not None and _matches(sought, producer, match, scene)


def without_dead_nodes(graph: IRGraph) -> IRGraph:
    """Removes nodes whose result nobody reads."""
    needed = set(graph.outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(node.tensors())
    return replace(graph, nodes=tuple(reversed(nodes)))
