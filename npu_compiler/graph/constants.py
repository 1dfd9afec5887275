"""What no input reaches is not computed in each run.

Results of nodes that read constants alone are computed here, and stored in the program where they are small; larger
ones, and those that weights reach, are made once, when weights are loaded, by a recipe of expressions. What costs a
kernel nothing stays: a view of a weight, positions and numbers as part of an expression, and codes of weights that are
narrower than what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from npu_compiler.artifact.describe import counted, format_bytes
from npu_compiler.artifact.recipes import EXPRESSIONS, WeightInput, WeightRecipe
from npu_compiler.artifact.stages import Stage, is_computable
from npu_compiler.artifact.traced_stages import needed_for, stage_of
from npu_compiler.dtypes import FLOAT64
from npu_compiler.errors import IRError, ProgramFormatError, UnsupportedOpError, WeightError
from npu_compiler.graph.tracing import results_of
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.creation import empty
from npu_compiler.ops.registry import definition, spelled, traits_of
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.expr import Expr, Load, has_reduce, leaves, walk
from npu_compiler.tensor.layout import BufferSpec, Layout, dense
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, Trace

__all__ = ["Fold", "constant_nodes", "find_folds", "fold_constants", "read_no_shapes"]

CARRIED_BYTES = 1 << 16
"""Of a constant, up to which a program carries it; a larger one is computed when weights are loaded."""

_GROWTH = 4
_MOST_GROWN_BYTES = 32 << 20  # made of weights that are smaller than a fourth of it

Bind = Callable[[OpNode], OpNode | None]
"""A node with its tensors by parameter; None where it cannot be bound."""


@dataclass(frozen=True)
class Fold:
    """A tensor that is a weight instead of the result of nodes.

    Attributes:
        name: Of the tensor.
        recipe: How it is made.
        nodes: Names of the nodes that would compute it.
    """

    name: str
    recipe: WeightRecipe
    nodes: tuple[str, ...]


def fold_constants(graph: IRGraph) -> IRGraph:
    """The graph whose tensors that no input reaches are weights, where a kernel would have to compute them."""
    folds = find_folds(graph, lambda node: node)
    if not folds:
        return graph
    weights, notes = dict(graph.weights), list(graph.notes)
    for fold in folds:
        weights[fold.name] = fold.recipe
        when = "loaded" if fold.recipe.transform == EXPRESSIONS else "compiled"
        size = format_bytes(prod(fold.recipe.spec.shape) * fold.recipe.spec.dtype.size)
        of = counted(len(fold.nodes), "node")
        notes.append(f"'{fold.name}', {of} that no input reaches, {size}: computed once, when the model is {when}")
    made = {fold.name for fold in folds}
    idle = _idle_nodes(graph, made)
    nodes = tuple(node for node in graph.nodes if node.name not in idle)
    return replace(graph, nodes=nodes, weights=weights, notes=tuple(notes))


def read_no_shapes(graph: IRGraph) -> IRGraph:
    """The graph in which ops that ask for the shape and the data type of their first operand read another one like it.

    So ``zeros_like(x)`` is a constant, and does not wait for x.
    """
    nodes, tensors = list[OpNode](), dict(graph.tensors)
    for node in graph.nodes:
        first = next(iter(node.tensors()), None)
        if first is not None and not traits_of(node.op).reads_first:
            spec, key = graph.tensors[first], next(iter(node.inputs))
            name = f"{node.name}.like"
            while name in tensors:
                name += "_"
            tensors[name] = replace(spec, name=name)
            attrs = {"size": list(spec.shape), "dtype": spec.dtype.name}
            nodes.append(OpNode(name, spelled(empty), {}, attrs, (name,)))
            node = replace(node, inputs={**node.inputs, key: name})
        nodes.append(node)
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=tuple(nodes), tensors=tensors)


def constant_nodes(graph: IRGraph) -> dict[str, bool]:
    """Names of the nodes that no input reaches, in a graph that `read_no_shapes` gave; whether weights do."""
    kinds: dict[str, bool] = {name: bool(recipe.inputs) for name, recipe in graph.weights.items()}
    found: dict[str, bool] = {}
    for node in graph.nodes:
        entry = definition(node.op)
        if entry is None or not node.outputs or entry.traits.asserts:
            continue
        read = list(node.tensors())
        if (read or entry.creates) and all(name in kinds for name in read):
            found[node.name] = any(kinds[name] for name in read)
            kinds.update(dict.fromkeys(node.outputs, found[node.name]))
    return found


def find_folds(graph: IRGraph, bind: Bind) -> list[Fold]:
    """The tensors that are better weights, in the order of the graph.

    Args:
        graph: What `read_no_shapes` gave.
        bind: Gives a node's tensors by their parameters.
    """
    constant = constant_nodes(graph)
    scene = _Scene(graph, constant, bind)
    folds = []
    for name in scene.borders():
        fold = scene.fold(name)
        if fold is not None:
            folds.append(fold)
    return folds


class _Scene:
    """What is asked of a graph again and again."""

    def __init__(self, graph: IRGraph, constant: Mapping[str, bool], bind: Bind) -> None:
        self._graph, self._constant = graph, constant
        self._bind = bind
        self._makers = graph.producers()
        self._users = graph.users()

    def borders(self) -> Iterator[str]:
        """Tensors that no input reaches and that are read by what one does reach, in order.

        Several views of a tensor that are larger together than itself are left to be views.
        """
        outputs, bases = set(self._graph.outputs), dict[str, list[str]]()
        for node in self._graph.nodes:
            for name in node.outputs if node.name in self._constant else ():
                readers = self._users.get(name, ())
                if name in outputs or any(user.name not in self._constant and user.outputs for user in readers):
                    bases.setdefault(self._base(name), []).append(name)
        for base, views in bases.items():
            sizes = [prod(self._graph.tensors[name].shape) for name in views]
            yield from [base] if sum(sizes) > prod(self._graph.tensors[base].shape) else views

    def _base(self, name: str) -> str:
        """What a tensor is a view of, as far as no input reaches."""
        while name in self._makers:
            node = self._makers[name]
            known = traits_of(node.op, node.attrs)
            if not (known.work is Work.VIEW or known.is_silent) or not any(node.tensors()) or known.picks:
                break
            name = node.tensors()[0]
        return name

    def fold(self, name: str) -> Fold | None:
        """How a tensor is made without nodes; None where nodes are better, or nothing else can make it."""
        if name not in self._makers:
            return None  # a weight
        nodes = self._nodes_behind(name)
        of_weights = any(self._constant[node.name] for node in nodes)
        bound = [self._bind(node) for node in nodes]
        if any(node is None for node in bound):
            return None
        made = _Making(self._graph, [node for node in bound if node is not None])
        try:
            if not self._is_worthwhile(name, made, of_weights):
                return None
            recipe = made.recipe(name)
        except (UnsupportedOpError, IRError, OpRefusal):
            return None  # the definition says why, where the node is lowered
        if recipe is None:
            return None
        if not recipe.inputs and recipe.spec.nbytes <= CARRIED_BYTES:
            recipe = _carried(recipe)
        return None if recipe is None else Fold(name, recipe, tuple(node.name for node in nodes))

    def _nodes_behind(self, name: str) -> list[OpNode]:
        """The nodes that compute a tensor, in order."""
        wanted, stack = dict[str, OpNode](), [name]
        while stack:
            node = self._makers.get(stack.pop())
            if node is not None and node.name not in wanted:
                wanted[node.name] = node
                stack += node.tensors()
        return [node for node in self._graph.nodes if node.name in wanted]

    def _is_worthwhile(self, name: str, made: _Making, of_weights: bool) -> bool:
        spec = self._graph.tensors[name]
        if not prod(spec.shape) or spec.dtype == FLOAT64:
            return False
        plain = made.as_expression(name)
        if not of_weights:
            return plain is None or made.has_wide_numbers
        if plain is not None and isinstance(plain.expr, Load) and plain.expr.index is None:
            return False  # a view
        nbytes = prod(spec.shape) * spec.dtype.size
        sources = made.source_bytes
        if nbytes > max(_GROWTH * sources, _MOST_GROWN_BYTES):
            return False
        if plain is None:
            return nbytes <= sources or not made.is_of_codes_alone or self._is_filter(name)
        if nbytes > sources and _widens(plain.expr) and not self._is_filter(name):
            return False
        simple = not has_reduce(plain.expr) and all(load.index is None for load in leaves(plain.expr))
        small = nbytes <= min(sources, CARRIED_BYTES)  # a variance may be too large for the device, its root is not
        return small or not simple or made.has_wide_numbers or self._meets_anchor(name)

    def _is_filter(self, name: str) -> bool:
        """Whether a convolution reads a tensor as its filter: codes would become numbers anew in each run."""
        readers = ((user, traits_of(user.op).images) for user in self._users.get(name, ()))
        return any(user.inputs.get(key) == name for user, roles in readers for key in roles if "weight" in roles[key])

    def _meets_anchor(self, name: str) -> bool:
        """Whether a product, or another algorithm of its own, reads a tensor, through whatever views."""
        stack = [name]
        while stack:
            for user in self._users.get(stack.pop(), ()):
                known = traits_of(user.op, user.attrs)
                if known.work is Work.ANCHOR:
                    return True
                if known.work is Work.VIEW or known.is_silent:
                    stack += user.outputs
        return False


def _widens(expr: Expr) -> bool:
    """Whether elements are read that take less memory than the result: codes, also of a codebook, or flags."""
    inside = {node for load in leaves(expr) if load.index is not None for node in walk(load.index)}
    return any(load.dtype.size < (2 if load in inside else expr.dtype.size) for load in leaves(expr))


def _carried(recipe: WeightRecipe) -> WeightRecipe | None:
    """A recipe of constants with its result; None where there is none, as with an index beyond its tensor."""
    try:
        value = recipe.compute(())
    except (ProgramFormatError, WeightError):
        return None
    data = np.ascontiguousarray(value, recipe.spec.host_dtype.numpy).tobytes()
    return WeightRecipe(recipe.spec, (), data=data)


class _Dense:
    """Every tensor is row-major."""

    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        return dense(shape)


class _Making:
    """Nodes that no input reaches, traced."""

    def __init__(self, graph: IRGraph, nodes: Sequence[OpNode]) -> None:
        self._graph, self._nodes = graph, nodes
        made = {output for node in nodes for output in node.outputs}
        read = dict.fromkeys(name for node in nodes for name in node.tensors() if name not in made)
        self._sources = list(read)

    @property
    def source_bytes(self) -> int:
        """Of the weights that are read."""
        specs = [self._graph.tensors[name] for name in self._sources]
        return sum(prod(spec.shape) * spec.dtype.size for spec in specs)

    @property
    def has_wide_numbers(self) -> bool:
        """Whether there are numbers on the way that no device has."""
        return any(self._graph.tensors[name].dtype == FLOAT64 for node in self._nodes for name in node.outputs)

    @property
    def is_of_codes_alone(self) -> bool:
        """Whether all that is done is to make numbers of codes, those of scales before those of weights."""
        known = [traits_of(node.op, node.attrs) for node in self._nodes]
        return all(traits.makes_numbers or traits.work is Work.VIEW for traits in known)

    def as_expression(self, name: str) -> Tensor | None:
        """The tensor as one expression of its sources; None where something on the way has to be in memory."""
        trace, env = self._traced(in_memory=False)
        return env[name] if len(trace.tensors) == len(self._sources) else None

    def _traced(self, in_memory: bool) -> tuple[Trace, dict[str, Tensor]]:
        trace, env = Trace(_Dense()), dict[str, Tensor]()
        for name in self._sources:
            spec = self._graph.tensors[name]
            env[name] = trace.add(name, spec.shape, spec.dtype, "plain")
        for node in self._nodes:
            trace.node = node.name
            declared = [self._graph.tensors[name] for name in node.outputs]
            for result, spec in zip(results_of(node, env, trace, declared), declared, strict=True):
                stored = result if result.dtype == spec.dtype else result.cast(spec.dtype)
                env[spec.name] = stored.realize() if in_memory else stored
        return trace, env

    def recipe(self, name: str) -> WeightRecipe | None:
        """How the tensor is made when weights are loaded; None where expressions cannot say it."""
        trace, env = self._traced(in_memory=True)
        made, spec = env[name], self._graph.tensors[name]
        ref = made.placed()
        if not ref.view.same_elements(trace.tensors[ref.tensor].view) or trace.tensors[ref.tensor].source is None:
            ref = trace.map(made).placed()
        needed = needed_for(trace.tensors, ref.tensor)
        sources = [index for index in needed if trace.tensors[index].source is None]
        stages: list[Stage] = []
        inputs: list[WeightInput] = []
        numbers: dict[int, int] = {}
        literal: list[int] = []
        for index in sources:
            source = self._graph.weights[trace.tensors[index].name]
            if trace.tensors[index].dtype != source.spec.host_dtype:
                return None  # it holds codes
            if source.inputs and source.is_plain:
                numbers[index] = len(inputs)
                inputs.append(source.inputs[0])
            elif source.data:
                literal.append(index)
            else:
                return None
        for index in literal:
            numbers[index] = len(inputs) + len(stages)
            source = self._graph.weights[trace.tensors[index].name]
            stages.append(Stage(source.spec.shape, source.spec.host_dtype, (), source.data))
        for index in needed:
            if index in numbers:
                continue
            stage = stage_of(trace.tensors[index], trace.tensors, numbers)
            if stage is None:
                return None
            numbers[index] = len(inputs) + len(stages)
            stages.append(stage)
        if not is_computable(stages, len(inputs)):
            return None
        buffer = BufferSpec(name, spec.dtype, spec.dtype, dense(spec.shape))
        return WeightRecipe(buffer, tuple(inputs), EXPRESSIONS, stages=tuple(stages))


def _idle_nodes(graph: IRGraph, made: Collection[str]) -> set[str]:
    """Nodes that no input reaches and that nobody needs once some tensors are weights."""
    constant, read, idle = constant_nodes(graph), set(graph.outputs), set()
    for node in reversed(graph.nodes):
        wanted = any(name in read and name not in made for name in node.outputs)
        if node.name in constant and not wanted:
            idle.add(node.name)
        else:
            read.update(node.tensors())
    return idle
