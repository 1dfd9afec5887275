"""What a kernel's body is split into: items of a threadgroup, and pieces of a region that rows and lanes run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from software_gpu.statements import Block, Declaration, For, If, Simple, Statement, While, tokens_of
from software_gpu.variables import Collective

__all__ = [
    "CollectivePiece",
    "GroupBlock",
    "GroupCode",
    "Item",
    "Lanes",
    "Masked",
    "Piece",
    "Region",
    "RowBlock",
    "RowCode",
    "RowReturn",
    "Strided",
    "has_row_return",
    "regions_of",
    "returns_in_lanes",
]


@dataclass(eq=False)
class Lanes:
    """Statements that each lane runs for itself."""

    statements: list[Statement]


@dataclass(eq=False)
class RowCode:
    """A statement that runs once for a row: its lanes share what it computes, or own a matrix together."""

    statement: Declaration | Simple


@dataclass(eq=False)
class RowReturn:
    """The lanes of a row return together."""


@dataclass(eq=False)
class RowBlock:
    """A scope, a branch or a loop whose head the lanes of a row share."""

    head: Block | If | For | While
    body: list[Piece]
    otherwise: list[Piece] = field(default_factory=list)


@dataclass(eq=False)
class Masked:
    """A branch that some lanes take, around work that the row does together."""

    mask: str
    condition: list[str]
    body: list[Piece]
    otherwise: list[Piece]


@dataclass(eq=False)
class Strided:
    """`for (T i = start; i < bound; i += step)` where lanes start apart and step alike: the row steps together."""

    variable: Declaration
    start: list[str]
    bound: list[str]
    step: list[str]
    body: list[Piece]


@dataclass(eq=False)
class CollectivePiece:
    """A simdgroup function whose result is the variable `name`."""

    name: str
    collective: Collective
    argument: list[str]
    operand: list[str]


Piece = Lanes | RowCode | RowReturn | RowBlock | Masked | Strided | CollectivePiece


@dataclass(eq=False)
class Region:
    """What happens between two barriers."""

    pieces: list[Piece]


@dataclass(eq=False)
class GroupCode:
    """A statement that runs once for a threadgroup."""

    statement: Statement


@dataclass(eq=False)
class GroupBlock:
    """A scope, a branch or a loop around barriers."""

    head: Block | If | For | While
    body: list[Item]
    otherwise: list[Item] = field(default_factory=list)


Item = Region | GroupCode | GroupBlock


def regions_of(items: Sequence[Item]) -> Iterator[Region]:
    """All regions, in the order of the source."""
    for item in items:
        match item:
            case Region():
                yield item
            case GroupBlock(_, body, otherwise):
                yield from regions_of([*body, *otherwise])
            case GroupCode():
                pass


def returns_in_lanes(piece: Piece) -> bool:
    """Whether lanes return, each for itself."""
    match piece:
        case Lanes(statements):
            return any("return" in tokens_of(statement) for statement in statements)
        case RowBlock() | Masked():
            return any(returns_in_lanes(inner) for inner in [*piece.body, *piece.otherwise])
        case _:
            return False


def has_row_return(piece: Piece) -> bool:
    """Whether the lanes of a row return together."""
    match piece:
        case RowReturn():
            return True
        case RowBlock() | Masked():
            return any(has_row_return(inner) for inner in [*piece.body, *piece.otherwise])
        case _:
            return False
