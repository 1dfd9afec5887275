"""Fusion by derivation: which traced tensors become kernels, and what each kernel computes.

An elementwise tensor with one reader that is elementwise too is computed in that reader's kernel, in registers. One
that follows a matmul, a convolution, a pooling or attention becomes its epilogue. A reduction over the last dimension
is computed in the kernel that reads its result, if that goes over the same rows. No fused kernel is listed anywhere:
RMSNorm, softmax or add+ReLU are what these rules give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from npu_compiler.lowering.operands import MAX_ELEMENTS
from npu_compiler.lowering.output_parts import in_parts
from npu_compiler.lowering.problems.build import problem_of, takes_epilogue
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Added, Paired, Problem
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.row_alignment import column_step, expands, realign_rows, reshaped
from npu_compiler.lowering.value import MAX_READS, Value, is_cheap
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Expr, Load, Ref, has_reduce, leaves, reindex, substitute
from npu_compiler.tensor.rounded import simplified
from npu_compiler.tensor.symbolic import OpRefusal, Trace
from npu_compiler.tensor.trace import Anchor, Map, Scatter, TracedTensor, users_of
from npu_compiler.tensor.view import View

__all__ = ["Group", "Loads", "group", "takes_pairs"]

Loads = Callable[["Group", int, Operand], bool]
"""What is asked of a target, see `CodegenTarget.loads`."""


@dataclass(frozen=True)
class Group:
    """The work of one kernel: at each position of `shape` it computes `expr` and stores it in `output`.

    Attributes:
        output: The tensor that it stores, or stores a part of.
        problem: The product, convolution, pooling or attention that it computes first; None without one.
        expr: The stored value. A load of the tensor `problem.result` in it is what the problem gave at this position,
            which lies in a register and in no memory.
        shape: The iteration space: the shape of the problem's result; without a problem that of the output, or of the
            values of a scatter. An expression that reduces does so along the last dimension.
        view: For each position of `shape`, the place of its value in the output's buffer.
        nodes: Names of the IR's nodes that it computes.
        index: For a scatter, over `shape`: the value goes `index * index_stride` elements behind its place in `view`.
        added: Another problem of the same shape, whose result is added to that of `problem` before `expr`.
        beside: Another tensor that it stores, [..., 1], and its expression, the same all along a row of `shape`.
        followers: Groups without problems that read its output, and nothing else that is made for them; its step stores
            their results, too.
    """

    output: TracedTensor
    problem: Problem | None
    expr: Expr
    shape: tuple[int, ...]
    view: View
    nodes: tuple[str, ...]
    index: Expr | None = None
    index_stride: int = 0
    added: Added | None = None
    beside: tuple[TracedTensor, Expr] | None = None
    followers: tuple[Group, ...] = ()

    @classmethod
    def of(cls, problem: Problem) -> Group:
        """A problem alone, whose results are stored as they are."""
        result = problem.result
        return cls(result, problem, result.load, result.shape, result.view, ())

    @cached_property
    def pairs(self) -> int:
        """2 where the epilogue combines two neighbouring columns of a product: the problem's result has twice the
        columns of `shape`, and its load at an offset of 1 is the odd column. Else 1.
        """
        return 1 if self.problem is None or not self.shape[-1] else self.problem.result.shape[-1] // self.shape[-1]

    @property
    def anchor(self) -> TracedTensor | None:
        """The result of its problem."""
        return None if self.problem is None else self.problem.result

    def check(self) -> None:
        """Refuses what no kernel computes, whatever the target.

        Raises:
            OpRefusal: The result, or an operand of a problem, has more elements than kernels can count, or sizes are
                out of their range.
        """
        added = None if self.added is None else self.added.problem
        problems = [problem for problem in (self.problem, added) if problem is not None]
        for problem in problems:
            problem.check()
        if problems and self.output.layout.size >= MAX_ELEMENTS:
            raise OpRefusal(f"the result has {self.output.layout.size} elements, more than kernels address (2^31)")

    def loading(self, position: int, operand: Operand) -> Group:
        """The same group, with another form of an operand of its problem."""
        assert self.problem is not None
        return changed(self, problem=self.problem.with_operand(position, operand))

    def after(self, nodes: Iterable[str]) -> Group:
        """The same group, which covers further nodes ahead of its own."""
        return changed(self, nodes=tuple(dict.fromkeys((*nodes, *self.nodes))))

    def apart(self) -> tuple[Group, ...]:
        """Groups that store one tensor each: this one, and what it stores beside its own."""
        if self.beside is None:
            return (self,)
        stored, expr = self.beside
        shape = (*self.shape[:-1], 1)
        view = stored.view.reshape(shape)
        assert view is not None
        alone = changed(self, output=stored, expr=expr, shape=shape, view=view, beside=None)
        return changed(self, beside=None), alone

    def reads(self) -> tuple[int, ...]:
        """Indices of the tensors it reads from memory, each once."""
        return self._reads

    def stores(self) -> tuple[int, ...]:
        """Indices of the tensors that it stores, or stores a part of: its own, those of operands that it makes, and
        those of its followers.
        """
        operands = () if self.problem is None else self.problem.operands
        made = [index for operand in operands for index in operand.stores()]
        return (self.output.index, *made, *(follower.output.index for follower in self.followers))

    def times_read(self, index: int) -> int:
        """As how many operands, and loads of its expressions, it reads a tensor."""
        return sum(read == index for read in self._each_read())

    @cached_property
    def _reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._each_read()))

    def _each_read(self) -> Iterator[int]:
        if self.problem is not None:
            yield from self.problem.reads()
        if self.added is not None:
            yield from self.added.reads()
        own = self.anchor.index if self.anchor is not None else -1
        exprs = [self.expr, *(() if self.index is None else (self.index,))]
        yield from (load.ref.tensor for expr in exprs for load in leaves(expr) if load.ref.tensor != own)
        for follower in self.followers:
            yield from (index for index in follower.reads() if index != self.output.index)

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether it is a mere loop nest, with neither anchor nor reduction."""
        return self.problem is None and not has_reduce(self.expr)


def takes_pairs(result: TracedTensor, tensors: Sequence[TracedTensor], loads: Loads) -> bool:
    """Whether an epilogue may combine two neighbouring columns of an anchor.

    Args:
        result: A tensor whose source is an `Anchor`.
        tensors: The trace's tensors.
        loads: Asked whether the epilogue of the problem can take its result as `Paired`.
    """
    problem = problem_of(result, tensors)
    if not isinstance(problem, Product) or result.shape[-1] % 2:
        return False
    return loads(Group.of(problem), len(problem.operands), Paired(result, result.ref))


def group(trace: Trace, outputs: Collection[int], in_place: Collection[int], loads: Loads) -> dict[int, list[Group]]:
    """Groups a trace into kernels.

    Args:
        trace: The traced graph.
        outputs: Indices of the tensors that must end up in memory.
        in_place: Indices of the scatters whose result is the very memory that they change.
        loads: Whether a group's launches can load an operand of a form, see `CodegenTarget.loads`.

    Returns:
        By index, what computes each tensor that may have to be stored: one group; two where a scatter copies first; or
        several that each write a part of it.
    """
    return _Grouping(trace, set(outputs), in_place, loads).run()


class _Grouping:
    def __init__(self, trace: Trace, outputs: set[int], in_place: Collection[int], loads: Loads) -> None:
        self.tensors, self.in_place, self.loads = trace.tensors, in_place, loads
        self.values: dict[int, Value] = {}
        self.computed_in: dict[int, int] = {}  # tensor -> the one tensor whose kernel computes it, instead of its own
        self.stored = outputs  # tensors that must be in memory
        self.needed = _needed(self.tensors, outputs)
        self.users = users_of(self.needed)
        self.problems: dict[int, Problem] = {}  # by the index of their result
        for tensor in self.needed:
            if isinstance(tensor.source, Anchor):
                self.stored.update(ref.tensor for ref in tensor.source.operands)
                if not takes_epilogue(tensor.source.kind):
                    self.stored.add(tensor.index)
            elif isinstance(tensor.source, Scatter):
                self.stored.add(tensor.source.into.tensor)

    def run(self) -> dict[int, list[Group]]:
        for tensor in self.needed:
            source = tensor.source
            if isinstance(source, Map):
                value = self._with_inlined_operands(tensor, source.expr, tensor.shape)
                self.values[tensor.index] = self._as_epilogue(tensor, value) or value
            elif isinstance(source, Scatter):
                self.stored.update([*self._rows_beside(source)])
                value = self._with_inlined_operands(tensor, source.expr, source.shape)
                index = self._with_inlined_operands(tensor, source.index, source.shape, MAX_READS - len(value.reads))
                self.values[tensor.index] = changed(value, index=index.expr, reads=value.reads | index.reads)
            elif isinstance(source, Anchor):
                reads = frozenset((tensor.index, *(ref.tensor for ref in source.operands)))
                self.values[tensor.index] = Value(tensor.load, tensor.shape, (tensor.name,), reads, anchor=tensor)
        return {index: self._as_groups(self.tensors[index], value) for index, value in self.values.items()}

    def _rows_beside(self, scatter: Scatter) -> Iterator[int]:
        """What a scatter looks up and does not reduce rows for: its places, and values that are one for each row."""
        for load in leaves(scatter.index):
            if load.ref.tensor in self.values and self.values[load.ref.tensor].reductions:
                yield load.ref.tensor
        for load in leaves(scatter.expr):
            if self._is_of_rows(load, scatter.shape):
                yield load.ref.tensor

    def _with_inlined_operands(
        self, tensor: TracedTensor, expr: Expr, shape: tuple[int, ...], most_reads: int = MAX_READS
    ) -> Value:
        """The value of a tensor, with its operands computed in its kernel, not loaded, where that may be.

        Args:
            tensor: The tensor.
            expr: Its expression, which loads its operands.
            shape: The shape of `expr`.
            most_reads: How many tensors the result may load.
        """
        value = Value.of(expr, shape, most_reads)
        if value.is_full:
            return changed(value, nodes=(tensor.name,))
        if not value.reductions and any(self._is_of_rows(load, shape) for load in leaves(expr)):
            single = reindex(expr, shape, (("reshape", (*shape, 1)),))
            if single is not None:
                value = changed(value, expr=single, shape=(*shape, 1))
        inlined: dict[Expr, Expr] = {}
        loads: dict[int, list[Load]] = {}
        for load in leaves(value.expr):
            loads.setdefault(load.ref.tensor, []).append(load)
        for index, own in loads.items():
            producer = self.tensors[index]
            if not isinstance(producer.source, Map) or not self._may_inline(producer):
                continue
            larger = self._with_inlined(value, producer, own)
            if larger is not None:
                value, made = larger
                inlined |= made
                if len(self.users[index]) == 1:
                    self.computed_in[index] = tensor.index
        nodes = tuple(dict.fromkeys((*value.nodes, tensor.name)))
        expr = _replace_loads(value.expr, inlined)
        reads = frozenset(load.ref.tensor for load in leaves(expr))  # what is computed here may be loaded by the rest
        value = changed(value, expr=expr, nodes=nodes, reads=reads)
        return self._with_common_operands(tensor, value)

    def _with_inlined(
        self, value: Value, producer: TracedTensor, loads: Sequence[Load]
    ) -> tuple[Value, dict[Expr, Expr]] | None:
        """The value with a tensor computed wherever it loads it, and what stands in place of each load.

        None where one of the loads has to stay: to compute the tensor for the others would save nothing.
        """
        made: dict[Ref, Expr] = {}  # what reads the same elements becomes the same expression
        for load in loads:
            if load.ref in made and load.index is None:
                continue
            larger = value.with_made(producer.index, self.values[producer.index])
            replacement = None if larger is None else self._inline(load, producer, value.shape)
            if larger is None or replacement is None:
                return None
            value, made[load.ref] = larger, replacement
        return value, {load: made[load.ref] for load in loads}

    def _with_common_operands(self, tensor: TracedTensor, value: Value) -> Value:
        """`value`, the kernel of `tensor`, computes operands that have several readers, all of them in this kernel.

        So the exponentials of a softmax, which its sum and its quotient read, are computed once.
        """
        waiting, tried = sorted(value.reads), set(value.reads)
        while waiting:
            index = waiting.pop()
            producer = self.values.get(index)
            if producer is None or index in self.stored or not isinstance(self.tensors[index].source, Map):
                continue
            larger = self._with_common(value, index) if self._is_only_reader(tensor, index) else None
            if larger is not None:
                value, self.computed_in[index] = larger, tensor.index
                waiting += sorted(value.reads - tried)
                tried |= value.reads
        return value

    def _with_common(self, value: Value, index: int) -> Value | None:
        """`value` with all loads of the tensor `index` replaced by one expression; None where they need several."""
        made, producer = self.values[index], self.tensors[index]
        larger = value.with_made(index, made) if made.anchor is None else None
        if larger is None:
            return None
        loads = [load for load in leaves(value.expr) if load.ref.tensor == index]
        if not made.reductions and len({load.ref.view for load in loads}) > 1:
            return None  # other elements of it are another expression
        found: dict[Ref, Expr | None] = {}
        for load in loads:
            if load.ref not in found or load.index is not None:
                found[load.ref] = self._inline(load, producer, value.shape)
        (shared, *others) = dict.fromkeys(found.values())
        if shared is None or others:
            return None
        nodes = tuple(dict.fromkeys((*made.nodes, *value.nodes)))
        return changed(larger, expr=_replace_loads(value.expr, dict.fromkeys(loads, shared)), nodes=nodes)

    def _is_only_reader(self, tensor: TracedTensor, index: int) -> bool:
        return all(self._reader(user) == tensor.index for user in self.users[index])

    def _is_of_rows(self, load: Load, shape: tuple[int, ...]) -> bool:
        """Whether a load of shape [..., n] reads, in order, one result for each row of a reduction [..., n, 1]."""
        producer = self.values.get(load.ref.tensor)
        if producer is None or not producer.reductions or producer.shape[-1] != 1 or load.index is not None:
            return False
        tensor = self.tensors[load.ref.tensor]
        own = reshaped(tensor.view, shape)
        in_order = own is not None and load.ref.view.same_elements(own)
        return in_order and shape[-1:] != (1,) and self._may_inline(tensor)

    def _may_inline(self, producer: TracedTensor) -> bool:
        """Whether a tensor may be computed where it is read instead of being stored."""
        value = self.values[producer.index]
        if producer.index in self.stored or value.anchor is not None:
            return False
        return len(self.users[producer.index]) == 1 or is_cheap(value.expr, self.tensors, prod(producer.shape))

    def _inline(self, load: Load, producer: TracedTensor, shape: tuple[int, ...]) -> Expr | None:
        """The producer's expression at the positions of `shape` that read it, or None where it must be stored."""
        if load.index is not None:
            return None
        made = self.values[producer.index]
        whole = load.ref.view.same_elements(producer.view)
        if made.reductions:
            return self._inline_rows(load.ref.view, producer, shape)
        steps = () if whole else load.ref.steps
        if made.shape != producer.shape:  # it was to read a row's result, and has a last dimension for that
            steps = (("reshape", producer.shape), *steps)
        return reindex(made.expr, made.shape, steps)

    def _inline_rows(self, read: View, producer: TracedTensor, shape: tuple[int, ...]) -> Expr | None:
        """The producer's expression, which reduces along rows, for a reader of `shape` that goes over the same rows.

        A row's result may be repeated along it: [..., 1] that is read as [..., n] is the same expression.

        Returns:
            The expression over `shape`, or None where the reader's rows are others, or in another order.
        """
        made = self.values[producer.index]
        width = read.shape[-1] if read.shape else 1
        target = (*shape[:-1], width)
        if not shape or not made.shape or not expands(read.shape, target):
            return None
        seen = read.expand(target)
        if made.shape[-1] == 1 and seen.strides[-1] == 0:
            width, seen = 1, View((*target[:-1], 1), (*seen.strides[:-1], 0), seen.offset)
        own = reshaped(producer.view, (*shape[:-1], width))
        if width != made.shape[-1] or own is None or not own.same_elements(seen):
            return None
        return realign_rows(made.expr, made.shape[:-1], shape[:-1])

    def _as_epilogue(self, tensor: TracedTensor, value: Value) -> Value | None:
        """`value` as the epilogue of the latest anchor among its operands, if it can be one."""
        if value.reductions or value.is_full or self._is_left_to_reader(tensor, value):
            return None
        candidates = set()
        for index in value.reads - self.stored:
            producer = self.values.get(index)
            if producer is None or producer.anchor is None or producer.pairs > 1:
                continue
            if self._is_only_reader(tensor, index):
                candidates.add((producer.anchor.index, index))
        for _, index in sorted(candidates, reverse=True):
            epilogue = self._onto_anchor(tensor, value, index)
            if epilogue is not None:
                return epilogue
        return None

    def _is_left_to_reader(self, tensor: TracedTensor, value: Value) -> bool:
        """Whether it is but numbers of codes, which its one reader may make: if anything is stored, then the codes."""
        users = self.users.get(tensor.index, set())
        if tensor.index in self.stored or len(users) != 1:
            return False
        is_computed = all(isinstance(self.tensors[user].source, Map) for user in users)
        read = [load.dtype for load in leaves(value.expr)]
        return is_computed and all(dtype.is_integer and dtype.size < tensor.dtype.size for dtype in read)

    def _reader(self, index: int) -> int:
        """The tensor whose kernel computes the tensor `index` in the end; often that is itself."""
        last = index
        while last in self.computed_in:
            last = self.computed_in[last]
        while index != last:
            following = self.computed_in[index]
            self.computed_in[index] = last
            index = following
        return last

    def _onto_anchor(self, tensor: TracedTensor, value: Value, index: int) -> Value | None:
        """`value` as an expression over the shape of the anchor that the operand `index` follows, or None.

        Each position reads the anchor's result at that position; or, for a matmul [..., m, 2 * n] and `value` of
        [..., m, n], position j the columns 2 * j and 2 * j + 1 of its row.
        """
        operand, made = self.tensors[index], self.values[index]
        anchor = made.anchor
        assert anchor is not None
        own = operand.view.reshape(anchor.shape)
        pairs = prod(anchor.shape) // max(1, prod(tensor.shape))
        if own is None or pairs not in (1, 2) or pairs * prod(tensor.shape) != prod(anchor.shape):
            return None
        if pairs == 2 and not takes_pairs(anchor, self.tensors, self.loads):
            return None
        shape = (*anchor.shape[:-1], anchor.shape[-1] // pairs)
        if tensor.view.reshape(shape) is None:
            return None
        expr = reindex(value.expr, value.shape, () if value.shape == shape else (("reshape", shape),))
        larger = value.with_made(index, made, pairs)
        if expr is None or larger is None:
            return None
        replacements: dict[Expr, Expr] = {}
        for load in (load for load in leaves(expr) if load.ref.tensor == index):
            step = column_step(load, own, pairs)
            made_there = None if step is None else reindex(made.expr, anchor.shape, step)
            if made_there is None:
                return None
            replacements[load] = made_there
        nodes = tuple(dict.fromkeys((*made.nodes, *value.nodes)))
        expr = _replace_loads(expr, replacements)
        return changed(larger, expr=expr, shape=anchor.shape, nodes=nodes, anchor=anchor, pairs=pairs)

    def _as_groups(self, tensor: TracedTensor, value: Value) -> list[Group]:
        if isinstance(tensor.source, Scatter):
            return self._scatter_groups(tensor, tensor.source, value)
        if value.anchor is None:
            shape = value.shape or (1,)  # what reduces has a last dimension
            view = tensor.view.reshape(shape)
            assert view is not None
            parts = in_parts(value.expr, view, MAX_READS) if value.is_full else [(value.expr, view)]
            return [Group(tensor, None, expr, part.shape, part, value.nodes) for expr, part in parts]
        shape = (*value.anchor.shape[:-1], value.anchor.shape[-1] // value.pairs)
        view = tensor.view.reshape(shape)
        assert view is not None
        problem = self.problems.get(value.anchor.index)
        if problem is None:
            problem = self.problems[value.anchor.index] = problem_of(value.anchor, self.tensors)
        return [Group(tensor, problem, value.expr, shape, view, value.nodes)]

    def _scatter_groups(self, tensor: TracedTensor, source: Scatter, value: Value) -> list[Group]:
        """The scatter itself, after a copy of what it leaves unless that is in place already."""
        stride = source.index_stride
        scatter = Group(tensor, None, value.expr, source.shape, source.view, value.nodes, value.index, stride)
        if tensor.index in self.in_place:
            return [scatter]
        untouched = Load(source.into, tensor.dtype)
        return [Group(tensor, None, untouched, tensor.shape, tensor.view, (f"copy for {tensor.name}",)), scatter]


def _needed(tensors: Sequence[TracedTensor], outputs: Collection[int]) -> list[TracedTensor]:
    """The tensors that outputs are made of, in order: of what an op gives, a model may leave a part."""
    needed = set(outputs)
    for tensor in reversed(tensors):
        if tensor.index in needed:
            needed.update(ref.tensor for ref in tensor.operands())
    return [tensor for tensor in tensors if tensor.index in needed]


def _replace_loads(expr: Expr, replacements: Mapping[Expr, Expr]) -> Expr:
    """`expr` with what stands in place of its loads, in the simplest form that this gives it."""
    if not replacements:
        return expr

    def rewritten(node: Expr) -> Expr | None:
        return simplified(node) if (found := replacements.get(node)) is None else found

    return substitute(expr, rewritten)
