"""What passes may know of an op beside its arithmetic; they ask for traits and never for a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.lenses import LensRule
from npu_compiler.ops.rows import RowRule, SelectionRule, Turn

__all__ = ["Memory", "Term", "Traits", "Work"]


class Work(Enum):
    """What computing a result takes."""

    ANCHOR = "an algorithm of its own: a product, a convolution, a pooling, attention"
    ROWS = "reductions over whole rows"
    ELEMENTWISE = "some arithmetic on the elements at one place"
    VIEW = "nothing: the same elements in another shape or order"
    OTHER = "anything else"


class Memory(Enum):
    """Where a result may lie."""

    OWN = "memory of its own"
    OPERAND = "that of the first operand"
    OPERAND_OF_SAME_DTYPE = "that of the first operand, unless the data type differs"
    OPERAND_IF_STRIDED = "that of the first operand where strides can say the result, else of its own"
    OPERAND_IF_CONTIGUOUS = "that of the first operand where its elements lie in order, else of its own"


def _always(node: OpNode, graph: IRGraph) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Term:
    """How an op is written in an equation (`rewrite`).

    Attributes:
        name: The operation; several ops may be spellings of one.
        parameters: The op's parameters, in the order of the equation's operands.
        commutes: Whether two operands may change places.
        holds: Whether a node's attributes and shapes make it this operation.
    """

    name: str
    parameters: tuple[str, ...]
    commutes: bool = False
    holds: Callable[[OpNode, IRGraph], bool] = _always


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What passes may know of an op.

    Attributes:
        work: What computing it takes.
        memory: Where its result may lie.
        lenses: How its results lie there, where they share memory.
        reads_first: Whether it reads any element of its first operand; some ops ask for its shape and data type alone.
        keeps_order: Whether the result has the elements of the first operand in the same row-major order, so that it
            is that operand wherever shape and data type agree.
        is_silent: Whether it has neither arithmetic nor an order of elements, so that nothing about it can be
            unsupported.
        unless: An attribute that makes it another op where it is true: then `keeps_order` and `is_silent` do not hold,
            and its result is in memory of its own.
        picks: Whether it gives one tensor of a list, by its attribute `index`.
        asserts: Whether it computes nothing, and checks what held when the model was extracted.
        rows: What it reads to give some rows of its result; none where it needs all, or nobody wrote it down.
        selects: Which rows of its operand it takes, where that is what it does.
        turn: The order in which it puts the dimensions of its operand, where that is what it does.
        images: Layout roles of its operands, by parameter.
        image_ranks: How many dimensions an operand has that is laid out so.
        takes_angle: Whether its operand is an angle, of which a half precision loses whole turns.
        makes_numbers: Whether it makes numbers of codes, which the products that read them may load themselves.
        is_learned: Whether its result is weighed by learned parameters, and so never an angle.
        exact: Parameters whose tensors half precision would spoil, as the scales of codes.
        fills: Parameters whose number becomes elements of the result as it is.
        factors: Parameters by whose number each element of the other operand is multiplied.
        keeps_whole: Whether the result of whole numbers is whole numbers.
        counts: Whether its results are numbers of elements, or scales, which a half precision does not hold.
        undefined: Why it has no definition, where more is to be said than that nobody wrote one.
        for_gradients: Whether its results behind the first serve gradients alone, and so have the shapes that the IR
            declares, whichever device it was exported on.
        flops: Floating-point operations by the shapes of all operands and the number of elements made; none for one
            operation an element.
        term: How equations write it, by which rules fold it with others (`rewrite`).
    """

    work: Work = Work.OTHER
    memory: Memory = Memory.OWN
    lenses: LensRule | None = None
    reads_first: bool = True
    keeps_order: bool = False
    is_silent: bool = False
    unless: str = ""
    picks: bool = False
    asserts: bool = False
    rows: RowRule | None = None
    selects: SelectionRule | None = None
    turn: Turn | None = None
    images: Mapping[str, str] = field(default_factory=dict)
    image_ranks: tuple[int, ...] = (4,)
    takes_angle: bool = False
    makes_numbers: bool = False
    is_learned: bool = False
    exact: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    keeps_whole: bool = False
    counts: bool = False
    undefined: str = ""
    for_gradients: bool = False
    flops: Callable[[Sequence[tuple[int, ...]], int], int | None] | None = None
    term: Term | None = None
