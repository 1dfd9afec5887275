"""What a model changes in place, made functional: afterwards no two tensors share memory, and nothing ever changes.

Each tensor is a view of some memory, through the lenses of the ops that led to it (`npu_compiler.ops.lenses`). An op
that changes one in place gives a new value of it, which is put back, lens by lens, into a new value of the memory; the
other views of that memory are taken from it anew when somebody reads them. What nobody reads is not made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from npu_compiler.errors import UnsupportedOpError
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops import lenses
from npu_compiler.ops.indexing import picked
from npu_compiler.ops.lenses import Lens, Spelling, ViewCall
from npu_compiler.ops.registry import is_in_place, traits_of
from npu_compiler.ops.rows import MALFORMED
from npu_compiler.ops.traits import Memory, Work
from npu_compiler.tensor.layout import dense
from npu_compiler.tensor.view import View

__all__ = ["functionalize"]

_REMEDY = "extract the model with npu_compiler.extract, which sees where PyTorch's tensors lie"


def functionalize(graph: IRGraph) -> IRGraph:
    """The graph without shared memory: what changes a tensor in place gives another tensor.

    Whoever reads it later, through whatever view, reads what it has become; an output of the graph is what it is in the
    end, also where that is an input. Ops keep their names: the in-place form of an op is read as the op itself.

    Raises:
        UnsupportedOpError: PyTorch refuses such a change too, as several elements of the view are one place in memory;
            or the IR does not say whether two tensors share memory.
    """
    if not any(is_in_place(node.op) or _is_of_storage(node) for node in graph.nodes):
        return graph
    return _Functional(graph).run()


def _is_of_storage(node: OpNode) -> bool:
    """Whether what a node gives depends on the memory behind its operand."""
    return traits_of(node.op).lenses is lenses.as_strided


def _changes_elements(node: OpNode) -> bool:
    """Whether a node changes the elements of its first operand, and not only how it is seen."""
    known = traits_of(node.op, node.attrs)
    return is_in_place(node.op) and not known.is_silent and (known.work is not Work.VIEW or _is_another(node))


def _is_another(node: OpNode) -> bool:
    """Whether an attribute makes a view something else, as dropout is in training."""
    unless = traits_of(node.op).unless
    return bool(unless and node.attrs.get(unless))


@dataclass(eq=False)
class _Storage:
    """Some memory.

    Attributes:
        changes: How often it was changed.
        last: The node that did so last.
        perhaps: Memory that may be the same: the IR does not say.
        doubtful: A node that may have changed it through that.
    """

    changes: int = 0
    last: str = ""
    perhaps: list[_Storage] = field(default_factory=list)
    doubtful: OpNode | None = None


@dataclass(eq=False)
class _Seen:
    """A tensor, as a view of memory.

    Attributes:
        storage: The memory.
        spec: Shape and data type, under the name that the model has for it.
        value: The tensor that holds its elements as they were after `fresh` changes.
        source, lens: What it is a view of, and how it lies there; none for all of the memory.
        place: Where its elements lie in memory; None where that is not known.
    """

    storage: _Storage
    spec: TensorSpec
    value: str
    fresh: int
    place: View | None
    source: _Seen | None = None
    lens: Lens | None = None

    def way(self) -> Iterator[tuple[_Seen, Lens, _Seen]]:
        """From the view to all of the memory: each view, its lens, and what it is a view of."""
        seen = self
        while seen.source is not None and seen.lens is not None:
            yield seen, seen.lens, seen.source
            seen = seen.source

    @property
    def root(self) -> _Seen:
        return [self, *(source for _, _, source in self.way())][-1]

    @property
    def is_fresh(self) -> bool:
        return self.fresh == self.storage.changes


class _Functional:
    """One walk over a graph."""

    def __init__(self, graph: IRGraph) -> None:
        self._graph = graph
        self._tensors = dict(graph.tensors)
        self._nodes: list[OpNode] = []
        self._made: set[str] = set()  # names of nodes that the graph did not have
        self._names = {*graph.tensors, *(node.name for node in graph.nodes)}
        self._seen: dict[str, _Seen] = {}
        for name in (*graph.inputs, *graph.weights):
            self._seen[name] = self._alone(graph.tensors[name], True)

    def run(self) -> IRGraph:
        for node in self._graph.nodes:
            if is_in_place(node.op) and not (node.outputs and any(node.tensors())):
                raise UnsupportedOpError(node.name, node.op, f"it changes several tensors in place; {_REMEDY}")
            current = node.renamed({name: self._current(self._seen[name]) for name in node.tensors()})
            if self._assigns_itself(node):
                self._seen[node.outputs[0]] = self._seen[node.tensors()[0]]
            elif _changes_elements(node):
                self._change(node, current)
            else:
                self._look(node, current)
        outputs = tuple(self._current(self._seen[name]) for name in self._graph.outputs)
        nodes = tuple(self._needed(outputs))
        names = {*self._graph.tensors, *(output for node in nodes for output in node.outputs)}
        tensors = {name: spec for name, spec in self._tensors.items() if name in names}
        return replace(self._graph, nodes=nodes, outputs=outputs, tensors=tensors)

    def _needed(self, outputs: Collection[str]) -> list[OpNode]:
        """The nodes, but for those that nobody reads and that the graph did not have, or that only see memory."""
        read, kept = set(outputs), list[OpNode]()
        for node in reversed(self._nodes):
            known = traits_of(node.op, node.attrs)
            idle = node.name in self._made or (node.outputs and (known.is_silent or known.work is Work.VIEW))
            if not idle or not read.isdisjoint(node.outputs):
                kept.append(node)
                read.update(node.tensors())
        return kept[::-1]

    # ---- what lies where

    def _look(self, node: OpNode, current: OpNode) -> None:
        """Takes over a node that changes no element, and says of its results where they lie."""
        known = traits_of(node.op, node.attrs)
        source = picked(node) if known.picks else next(iter(node.tensors()), None)
        if source is None or known.memory is Memory.OWN or _is_another(node):
            in_order = self._gives_in_order(node)
            self._seen.update({name: self._alone(self._tensors[name], in_order) for name in node.outputs})
        else:
            whole = self._seen[source]
            if _is_of_storage(node):
                current = self._of_storage(node, whole)
            for index, name in enumerate(node.outputs):
                self._seen[name] = self._view(node, whole, index)
            if is_in_place(node.op):
                self._seen[source] = self._seen[node.outputs[0]]  # it is seen so itself from here on
        self._nodes.append(current)

    def _alone(self, spec: TensorSpec, in_order: bool) -> _Seen:
        """A tensor in memory of its own; `in_order` says whether it is known to lie there in row-major order."""
        return _Seen(_Storage(), spec, spec.name, 0, dense(spec.shape).place if in_order else None)

    def _gives_in_order(self, node: OpNode) -> bool:
        """Whether a node's results are known to lie in row-major order; elsewhere PyTorch chooses their strides."""
        known = traits_of(node.op, node.attrs)
        usual = known.work in (Work.ELEMENTWISE, Work.ROWS, Work.VIEW) or (known.work is Work.ANCHOR and known.images)
        places = [self._seen[name].place for name in node.tensors()]
        return bool(usual or not places) and all(place is not None and place.is_contiguous for place in places)

    def _view(self, node: OpNode, whole: _Seen, index: int) -> _Seen:
        """The result of a node which may be a view of its operand."""
        known, spec = traits_of(node.op, node.attrs), self._tensors[node.outputs[index]]
        if known.memory is Memory.OPERAND_OF_SAME_DTYPE and spec.dtype != whole.spec.dtype:
            return self._alone(spec, whole.place is not None and whole.place.is_contiguous)
        found = self._lenses(node, whole, index)
        if found is None:
            return self._perhaps(spec, whole)
        seen = whole
        for lens in found:
            origin = seen.root if lens.of_storage else seen
            place = None if origin.place is None else lens.lies(origin.place)
            inner = TensorSpec(f"{spec.name}.whole", lens.shape, lens.dtype)
            seen = _Seen(whole.storage, inner, "", -1, place, origin, lens)
        if known.memory is Memory.OPERAND_IF_STRIDED and seen.place is None:
            return self._perhaps(spec, whole) if whole.place is None else self._alone(spec, True)
        if known.memory is Memory.OPERAND_IF_CONTIGUOUS:
            if whole.place is None or node.attrs.get("memory_format") not in _IN_ORDER:
                return self._perhaps(spec, whole)
            if not whole.place.is_contiguous:
                return self._alone(spec, True)
        if seen is whole:
            return whole
        return replace(seen, spec=spec, value=spec.name, fresh=whole.storage.changes)

    def _lenses(self, node: OpNode, whole: _Seen, index: int) -> Sequence[Lens] | None:
        """How a result lies in its operand; None where nobody knows."""
        known = traits_of(node.op, node.attrs)
        if known.picks:
            return ()
        made = [self._tensors[name] for name in node.outputs]
        shapes, offset = [spec.shape for spec in made], 0 if whole.place is None else whole.place.offset
        kind = made[index].dtype
        call = ViewCall(node.attrs, whole.spec.shape, whole.spec.dtype, shapes, index, kind, offset)
        try:
            found = None if known.lenses is None else known.lenses(call)
        except MALFORMED:
            return None  # the definition says why
        if found is None:
            return None
        given = (found[-1].shape, found[-1].dtype) if found else (whole.spec.shape, whole.spec.dtype)
        return found if given == (shapes[index], kind) else None

    def _perhaps(self, spec: TensorSpec, whole: _Seen) -> _Seen:
        """A tensor of which it is not known whether it shares memory with another."""
        seen = self._alone(spec, False)
        seen.storage.perhaps.append(whole.storage)
        whole.storage.perhaps.append(seen.storage)
        return seen

    def _of_storage(self, node: OpNode, whole: _Seen) -> OpNode:
        """A node that reads memory by strides, reading all of that memory, which lies in order."""
        found, root = self._lenses(node, whole, 0), whole.root
        if not found or whole.place is None or root.place is None or not root.place.is_contiguous:
            reason = f"the IR does not say where its operand '{whole.spec.name}' lies in memory"
            raise UnsupportedOpError(node.name, node.op, reason)
        key, taken = next(iter(node.inputs)), found[0]
        value = self._in_order(root.spec, self._current(root), taken, root.storage.last or node.name)
        return replace(node, inputs={key: value}, attrs={**node.attrs, **taken.take[1]})

    # ---- what it has become

    def _current(self, seen: _Seen) -> str:
        """The tensor that holds what a tensor has become."""
        doubtful = seen.storage.doubtful
        if doubtful is not None:
            raise UnsupportedOpError(
                doubtful.name,
                doubtful.op,
                f"it changes memory in place which '{seen.spec.name}', that is read later, may share, and the IR does "
                f"not say whether it does; {_REMEDY}",
            )
        stale = []
        for view, lens, source in seen.way():
            if view.is_fresh:
                break
            stale.append((view, lens, source))
        for view, lens, source in reversed(stale):
            whole = self._in_order(source.spec, source.value, lens, view.storage.last)
            view.value = self._emit(view.spec, lens.take, {"self": whole}, view.storage.last)
            view.fresh = view.storage.changes
        return seen.value

    def _assigns_itself(self, node: OpNode) -> bool:
        """Whether a node only stores what is there already, as ``x[0] += 1`` does after it has changed ``x[0]``."""
        if traits_of(node.op).reads_first or not is_in_place(node.op) or len(node.outputs) != 1:
            return False
        into, *others = (self._seen[name] for name in node.tensors())
        there = (into.storage, into.place, into.spec.shape, into.spec.dtype)
        same = [(seen.storage, seen.place, seen.spec.shape, seen.spec.dtype) == there for seen in others]
        return into.place is not None and same == [True]

    def _way_back(self, node: OpNode, seen: _Seen) -> list[tuple[_Seen, Lens, _Seen]]:
        """By which lenses a changed tensor goes back into its memory.

        Raises:
            UnsupportedOpError: Several elements of the tensor are one place in memory.
        """
        way, repeats = list(seen.way()), False
        for position, (_, lens, _) in enumerate(way):
            is_of_all = all(outer.has_all for _, outer, _ in way[:position])
            takes = lens.takes_one_value and is_of_all and self._is_of_one_value(node)
            repeats = repeats or bool(lens.refusal and not takes)
        root = seen.root
        if repeats and seen.place is not None and root.place is not None and root.place.is_contiguous:
            place = seen.place  # some of what is repeated, perhaps without repeats
            lens = lenses.strided(place.shape, place.strides, place.offset, seen.spec.dtype)
            way, repeats = [(seen, lens, root)], bool(lens.refusal)
        if repeats:
            raise UnsupportedOpError(node.name, node.op, f"it changes '{seen.spec.name}': {lenses.REPEATED}")
        return way

    def _is_of_one_value(self, node: OpNode) -> bool:
        """Whether a node gives all elements of its operand one value."""
        _, *others = node.tensors()
        return not traits_of(node.op).reads_first and all(not self._tensors[name].shape for name in others)

    def _change(self, node: OpNode, current: OpNode) -> None:
        """Takes over a node that changes its first operand, and puts the new value back into the memory."""
        seen = self._seen[node.tensors()[0]]
        made = self._tensors[node.outputs[0]]
        if (made.shape, made.dtype) != (seen.spec.shape, seen.spec.dtype):
            raise UnsupportedOpError(node.name, node.op, f"it makes '{seen.spec}' into '{made}' in place; {_REMEDY}")
        way = self._way_back(node, seen)
        wholes = [source.value if lens.has_all else self._current(source) for _, lens, source in way]
        self._nodes.append(current)
        storage = seen.storage
        storage.changes, storage.last = storage.changes + 1, node.name
        seen.value, seen.fresh = made.name, storage.changes
        for (view, lens, source), whole in zip(way, wholes, strict=True):
            read = {"self": view.value} if lens.has_all else {"self": whole, "src": view.value}
            read["self"] = self._in_order(view.spec if lens.has_all else source.spec, read["self"], lens, node.name)
            source.value = self._emit(source.spec, lens.put, read, node.name)
            source.fresh = storage.changes
        self._seen[made.name] = seen
        self._seen.update({name: self._alone(self._tensors[name], False) for name in node.outputs[1:]})
        for other in _all_of(storage):
            other.doubtful = node

    def _in_order(self, spec: TensorSpec, value: str, lens: Lens, after: str) -> str:
        """A tensor that lies in row-major order on the CPU as well, where a lens needs one."""
        return self._emit(spec, lenses.COPY_IN_ORDER, {"self": value}, after) if lens.in_order else value

    def _emit(self, spec: TensorSpec, spelling: Spelling, inputs: Mapping[str, str], after: str) -> str:
        """Adds a node, called by what it gives and the node that changed it."""
        name = base = f"{spec.name}.{after}"
        number = 1
        while name in self._names:
            number += 1
            name = f"{base}.{number}"
        self._names.add(name)
        self._made.add(name)
        self._tensors[name] = replace(spec, name=name)
        op, attrs = spelling
        self._nodes.append(OpNode(name, op, inputs, attrs, (name,)))
        return name


_IN_ORDER = (None, "contiguous_format", "preserve_format")


def _all_of(storage: _Storage) -> list[_Storage]:
    """The other memory that may be the same."""
    found = {storage: None}
    stack = [storage]
    while stack:
        for other in stack.pop().perhaps:
            if other not in found:
                found[other] = None
                stack.append(other)
    return [other for other in found if other is not storage]
