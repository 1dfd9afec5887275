"""The forms in which a problem gets an element of an operand, beside reading it from memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from npu_compiler.dtypes import ALL, FLOAT32, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.problems.product import Product
from npu_compiler.records import changed
from npu_compiler.tensor.coded import decoded
from npu_compiler.tensor.expr import Call, Expr, Load, Ref, has_reduce, leaves, reindex, substitute
from npu_compiler.tensor.layout import dense
from npu_compiler.tensor.view import Step, View

__all__ = ["CodedPages", "CodedRows", "Computed", "Dequantised", "FreshCodes", "GroupedCodes", "InPages", "Paged"]
__all__ += ["Produced", "Scattered", "Unscaled", "is_vector", "kind_of_codes"]


@dataclass(frozen=True)
class Computed(Operand):
    """An operand that is computed where it is read, from other tensors.

    Attributes:
        expr: Its elements, over the view's shape; a load with an index gathers.
        made: What would store the tensor, for launches that read it from memory all the same.
    """

    expr: Expr
    made: Group

    @property
    def element(self) -> Expr:
        return self.expr

    @property
    def is_of_rows(self) -> bool:
        """Whether an element needs its row first, as that of a norm does; else it is elementwise."""
        return has_reduce(self.expr)

    @property
    def row(self) -> Group:
        """What computes it as one row, neighbours side by side, where the view has no more."""
        return Group(self.tensor, None, self.expr, self.shape, View(self.shape, dense(self.shape).strides), ())

    def reads(self) -> tuple[int, ...]:
        return tuple(load.ref.tensor for load in leaves(self.expr))


@dataclass(frozen=True)
class Produced(Operand):
    """An operand that another problem gives, its epilogue included: it is computed where it is read.

    Attributes:
        made: What would store the tensor, for launches that read it from memory all the same.
        stored: Whether the tensor is stored as well, for others that read it.
    """

    made: Group
    stored: bool = False

    def apart(self, group: Group) -> tuple[Group, Group]:
        """What computes it and stores it, and a group that has it as its first operand, which then reads it there.

        Raises:
            OpRefusal: As `Group.check`.
        """
        self.made.check()
        nodes = tuple(node for node in group.nodes if node not in self.made.nodes)
        return self.made, changed(group.loading(0, self.in_memory), nodes=nodes)

    def reads(self) -> tuple[int, ...]:
        return self.made.reads()

    def stores(self) -> tuple[int, ...]:
        return (self.tensor.index,) if self.stored else ()


@dataclass(frozen=True)
class Unscaled(Operand):
    """The left matrix of a product, less a factor for each of its rows, by which the epilogue multiplies sums.

    Attributes:
        made: What is to store the matrix beside its own results, and sums of parts of these, of which the epilogue
            makes the factors.
    """

    made: Group


def is_vector(operand: Operand, problem: Problem | None, position: int, most_bytes: int) -> TypeGuard[Computed]:
    """Whether an operand is computed and the one row of a product by a matrix whose lines along k are contiguous.

    Args:
        operand: The operand.
        problem: What it is an operand of.
        position: Which of them.
        most_bytes: What its row may take in the product's data type.
    """
    if not isinstance(problem, Product) or position != 0 or not isinstance(operand, Computed):
        return False
    *outer, k = operand.shape
    fits = 0 < k * problem.result.dtype.size <= most_bytes
    return fits and all(n == 1 for n in outer) and problem.b.operand.strides[-2] == 1


def kind_of_codes(expr: Expr, code: Load) -> DType | None:
    """The data type whose codes a load gives, where an expression is the numbers of these; None where it is more."""
    if expr == Call("cast", (code,), FLOAT32):
        return code.dtype
    return next((kind for kind in ALL if kind.coding and expr == decoded(code, kind)), None)


@dataclass(frozen=True)
class Dequantised(Operand):
    """An operand of a product that is stored in codes of a byte, which become numbers where they are read.

    Its tensor and its view are those of the codes. A row here is what lies along k: a row of `a`, or a column of `b`.

    Attributes:
        expr: What the codes become, over the view's shape, but for the scale: of a load of the codes, and of what is
            the same all along a row, such as its zero point.
        scale: What each number is multiplied by, over the view's shape, the same all along a row; None for 1. It is
            left to the epilogue, which multiplies sums.
        code: The load of the codes in `expr`.
    """

    expr: Expr
    scale: Expr | None
    code: Load

    @property
    def in_memory(self) -> Operand:
        return self

    @property
    def kind(self) -> DType | None:
        """The data type whose codes they are, but for the scale; None where more is done to them, or less is known."""
        return kind_of_codes(self.expr, self.code)

    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.tensor.index, *(load.ref.tensor for load in leaves(self.expr)))))

    def by_row(self, position: int) -> Expr | None:
        """`expr` as a function of the row alone, over [rows]; a load of the codes stands for the one at hand.

        Args:
            position: The operand's: 0 for the left matrix, 1 for the right one.
        """
        rank = len(self.shape)
        row = rank - 2 + position
        steps: list[Step] = [("slice", (dim, 0, 1, 1)) for dim in range(rank) if dim != row]
        steps.append(("reshape", (self.shape[row],)))
        at_hand = Load(Ref(self.tensor.index, View(self.shape, (0,) * rank)), self.code.dtype)
        expr = substitute(self.expr, lambda node: at_hand if node is self.code else None)
        return reindex(expr, self.shape, tuple(steps))


@dataclass(frozen=True)
class GroupedCodes(Operand):
    """An operand of a product in codes of a few bits: ``(number of a code - zero) * scale + bias``.

    Its tensor is that of the codes. Its view has the operand's shape, [..., k, n] of a right matrix, [..., m, k] of a
    left one; strides and offset count bytes. Along k codes are packed, one behind another, the lowest bits of a
    byte first, and the stride there is 1; each row, which is what lies along k, begins with a byte of its own. What is
    the same for `group` neighbours along k, and for `rows` neighbouring rows, are operands of the same rank, whose
    dimensions are those of this one divided so, rounded up; strides of 0 are usual.

    Attributes:
        expr: The numbers, over the view's shape, as the graph computes them.
        bits: Of a code: 2 to 8.
        number: What a code is: an unsigned integer (``uint8``), a signed one (``int8``), or an 8-bit float.
        group: How many neighbours along k share a scale; all of k where it is that long.
        rows: How many neighbouring rows share scales, zeros and biases.
        scale: Floating point.
        zeros: Subtracted from the number: integers or floating point; None for `zero`.
        zero_bits: Where below 8, `zeros` are packed along their groups as codes are, and their strides count bytes.
        zero: Subtracted where there are no `zeros`.
        bias: Floating point; None for 0.
        codebook: [entries], floating point: the number of each code; None where codes are numbers themselves.
    """

    expr: Expr
    bits: int
    number: DType
    group: int
    rows: int
    scale: Operand
    zeros: Operand | None
    zero_bits: int
    zero: float
    bias: Operand | None
    codebook: Operand | None

    @property
    def parts(self) -> tuple[Operand, ...]:
        """What is read beside the codes."""
        return tuple(part for part in (self.scale, self.zeros, self.bias, self.codebook) if part is not None)

    def groups(self, position: int) -> int:
        """How many groups a row has, given the operand's position: 0 for the left matrix, 1 for the right one."""
        return ceil_div(self.shape[-1 - position], self.group)

    @property
    def in_memory(self) -> Operand:
        return self

    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.tensor.index, *(part.tensor.index for part in self.parts))))


@dataclass(frozen=True)
class FreshCodes:
    """New rows among keys or values in codes, rounded as `npu_codes.quantize` does by the launch that reads them.

    Attributes:
        numbers: What is rounded, over the shape of `codes`.
        codes, scales: What would store the codes and the scales of their rows, each at the same positions.
        stages: All that would be launched ahead, each stage after the one before: `codes` and `scales` are the last.
    """

    numbers: Expr
    codes: Group
    scales: Group
    stages: tuple[tuple[Group, ...], ...]

    def reads(self) -> tuple[int, ...]:
        """Indices of the tensors that numbers and places are made of."""
        assert self.codes.index is not None
        return tuple(load.ref.tensor for expr in (self.numbers, self.codes.index) for load in leaves(expr))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the IR's nodes that it covers."""
        return tuple(dict.fromkeys(node for stage in self.stages for group in stage for node in group.nodes))


@dataclass(frozen=True)
class CodedRows(Operand):
    """Keys or values of attention in codes of a byte, with a scale for each row: that of a head and a position.

    Its tensor and its view [batch, groups, length, size] are those of the codes. The scale of a key multiplies its
    scores, that of a value the weight of its position: no element is scaled where it is read.

    Attributes:
        kind: The data type whose codes they are.
        scale: Over the same shape, floating point, the same all along a row.
        numbers: The same operand as numbers that are computed, for launches that read these.
        fresh: Rows that are new, stored by the launch that reads the operand; None where another launch stores them.
    """

    kind: DType
    scale: Operand
    numbers: Computed
    fresh: FreshCodes | None = None

    @property
    def number_type(self) -> DType:
        return self.numbers.dtype

    @property
    def in_memory(self) -> Operand:
        return self.numbers.in_memory

    @property
    def made(self) -> Group:
        """What would store the numbers."""
        return self.numbers.made

    def reads(self) -> tuple[int, ...]:
        stored = (self.tensor.index, self.scale.tensor.index) if self.fresh is None else self.fresh.reads()
        return tuple(dict.fromkeys(stored))


@dataclass(frozen=True)
class Scattered(Operand):
    """An operand some of whose elements are new: they are stored to its memory by the launch that reads it.

    Attributes:
        made: What they are and where they go, elementwise.
    """

    made: Group

    def reads(self) -> tuple[int, ...]:
        return self.made.reads()


@dataclass(frozen=True)
class InPages(Operand):
    """Keys or values of attention that lie in pages, which a table names for each element of the batch, in order.

    Its tensor is the pool of pages. Its view has the operand's shape [batch, groups, length, size] and says how the
    elements of a page lie: position p, modulo `page`, by the stride along the length, and nothing along the batch.

    Attributes:
        page: Positions of a page.
        stride: Elements from one page to the next.
        table: The page of an element of the batch at each `page` positions, over [batch, length / page], and inside
            of the pool.
        copied: The operand as it would be in memory, side by side.
        made: What would store it so, for launches that read it from memory all the same.
    """

    page: int
    stride: int
    table: Expr
    copied: Operand
    made: Group

    @property
    def in_memory(self) -> Operand:
        return self.copied

    @property
    def pages(self) -> int:
        """Pages of an element of the batch."""
        return self.shape[2] // self.page

    @property
    def looked_up(self) -> tuple[int, ...]:
        """Indices of the tensors that the table is made of."""
        return tuple(load.ref.tensor for load in leaves(self.table))


@dataclass(frozen=True)
class Paged(InPages):
    """Numbers in pages.

    Attributes:
        fresh: Rows of pages that are new, and where they go: stored to the pool by the launch that reads it; None where
            another launch has stored them.
    """

    fresh: Group | None = None

    def reads(self) -> tuple[int, ...]:
        pool = (self.tensor.index,) if self.fresh is None else self.fresh.reads()
        return tuple(dict.fromkeys((*pool, *self.looked_up)))


@dataclass(frozen=True)
class CodedPages(InPages):
    """Codes of a byte in pages, with a scale for each row in pages of another pool, which the same table names.

    What `CodedRows` says of codes and scales holds here.

    Attributes:
        kind: The data type whose codes they are.
        scale: Over the same shape, with strides like those of the codes: how the scales of a page lie.
        scale_stride: Elements from one page of scales to the next.
        fresh: Rows of pages that are new, stored by the launch that reads the operand; None where another launch has
            stored them.
    """

    kind: DType
    scale: Operand
    scale_stride: int
    fresh: FreshCodes | None = None

    @property
    def number_type(self) -> DType:
        return self.copied.dtype

    def reads(self) -> tuple[int, ...]:
        pools = (self.tensor.index, self.scale.tensor.index) if self.fresh is None else self.fresh.reads()
        return tuple(dict.fromkeys((*pools, *self.looked_up)))
