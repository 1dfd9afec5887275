"""Where the region form keeps each variable: in a loop over lanes, in a row, or in the threadgroup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from software_gpu.constants import own_trips
from software_gpu.region_pieces import (
    CollectivePiece,
    Item,
    Lanes,
    Masked,
    Piece,
    RowBlock,
    RowCode,
    RowReturn,
    Strided,
    regions_of,
)
from software_gpu.statements import (
    Block,
    Declaration,
    For,
    If,
    Statement,
    UnknownForm,
    While,
    closing_bracket,
    names_in,
    tokens_of,
)
from software_gpu.variables import Variables

__all__ = ["RESULT", "Home", "Storage", "head_tokens", "plan_storage", "subscripts_are_constant", "unrolled_variables"]

UNROLLED_TRIPS = 16
RESULT = "msl_result_"  # begins the names of what simdgroup functions give


class Home(Enum):
    """LOCAL: where it is declared. AGAIN: declared again wherever it is used. ROW, GROUP: an array over lanes."""

    LOCAL = 0
    AGAIN = 1
    ROW = 2
    GROUP = 3


@dataclass
class Storage:
    """The plan.

    Attributes:
        homes: Of variables that lanes don't share, and of those a row shares when other regions use them too.
        spread: Arrays whose elements lie apart, those of neighbouring lanes side by side.
        declarations: By name, in the order of the source.
        users: The regions, by number, in which a variable is used.
    """

    homes: dict[str, Home] = field(default_factory=dict)
    spread: set[str] = field(default_factory=set)
    declarations: dict[str, Declaration] = field(default_factory=dict)
    users: dict[str, set[int]] = field(default_factory=dict)

    def home(self, name: str) -> Home:
        return self.homes.get(name, Home.LOCAL)


def head_tokens(statement: Block | If | For | While) -> list[str]:
    """Tokens of the head of a loop or branch."""
    match statement:
        case For(init, condition, step):
            return [*tokens_of(init), *condition, *step]
        case If(condition) | While(condition):
            return condition
        case Block():
            return []


def unrolled_variables(statement: Statement, integers: Mapping[str, int]) -> set[str]:
    """Variables of the loops in a statement that are short enough to be unrolled: constants to clang."""
    match statement:
        case For(init, _, _, body):
            own = isinstance(init, Declaration) and own_trips(statement, integers) <= UNROLLED_TRIPS
            inner = {name for part in body for name in unrolled_variables(part, integers)}
            return inner | {init.name} if own and isinstance(init, Declaration) else inner
        case Block(body) | While(_, body):
            return {name for part in body for name in unrolled_variables(part, integers)}
        case If(_, then, otherwise):
            return {name for part in [*then, *otherwise] for name in unrolled_variables(part, integers)}
        case _:
            return set()


def subscripts_are_constant(name: str, tokens: Sequence[str], constants: set[str]) -> bool:
    """Whether every use of an array in the tokens is an element that clang knows when loops are unrolled."""
    for index, token in enumerate(tokens):
        if token != name:
            continue
        end = index + 1
        if tokens[end : end + 1] != ["["]:
            return False
        while tokens[end : end + 1] == ["["]:
            after = closing_bracket(tokens, end) + 1
            if not names_in(tokens[end:after]) <= constants:
                return False
            end = after
    return True


@dataclass
class _Place:
    """A piece, or the head of one: the names it uses are in scope of one stretch of code."""

    region: int
    tokens: list[str]


@dataclass
class _Planner:
    variables: Variables
    integers: Mapping[str, int]
    places: list[_Place] = field(default_factory=list)
    lane_variables: set[str] = field(default_factory=set)
    unrolled: set[str] = field(default_factory=set)
    storage: Storage = field(default_factory=Storage)

    def visit(self, piece: Piece, region: int) -> None:
        tokens: list[str] = []
        inner: list[Piece] = []
        match piece:
            case Lanes(statements):
                for statement in statements:
                    tokens += [*tokens_of(statement), ";"]
                    self.unrolled |= unrolled_variables(statement, self.integers)
                    if isinstance(statement, Declaration):
                        self.storage.declarations[statement.name] = statement
                        self.lane_variables.add(statement.name)
            case RowCode(statement):
                tokens = tokens_of(statement)
                if isinstance(statement, Declaration):
                    self.storage.declarations[statement.name] = statement
            case CollectivePiece():
                tokens = [*piece.argument, ";", *piece.operand]
            case Strided():
                tokens = [*piece.start, ";", *piece.bound, ";", *piece.step]
                inner = piece.body
            case RowBlock():
                tokens = head_tokens(piece.head)
                inner = [*piece.body, *piece.otherwise]
            case Masked():
                tokens = piece.condition
                inner = [*piece.body, *piece.otherwise]
            case RowReturn():
                pass
        self.places.append(_Place(region, tokens))
        for part in inner:
            self.visit(part, region)

    def plan(self) -> Storage:
        again = {name for name in self.lane_variables if self._can_repeat(name)}
        used = self._used(again)
        lost = {name for name in again if self._reads_result(name) and len(self._regions(name, used)) > 1}
        if lost:
            again -= lost
            used = self._used(again)
        for name, declaration in self.storage.declarations.items():
            users = [i for i, names in enumerate(used) if name in names]
            regions = self._regions(name, used)
            self.storage.users[name] = regions
            home = self._home(declaration, len(users), len(regions), name in again)
            self.storage.homes[name] = home
            if home in {Home.ROW, Home.GROUP}:
                self._check_storable(declaration)
        return self.storage

    def _used(self, again: set[str]) -> list[set[str]]:
        """The names that each place uses."""
        used = [names_in(place.tokens) for place in self.places]
        for names in used:
            self._add_dependencies(names, again)
        return used

    def _regions(self, name: str, used: Sequence[set[str]]) -> set[int]:
        return {place.region for place, names in zip(self.places, used, strict=True) if name in names}

    def _reads_result(self, name: str) -> bool:
        """Whether it reads what lanes have got from a simdgroup function, which is gone with its region."""
        return any(each.startswith(RESULT) for each in self.storage.declarations[name].initializer or [])

    def _home(self, declaration: Declaration, users: int, regions: int, repeatable: bool) -> Home:
        name = declaration.name
        if name not in self.lane_variables:
            return Home.GROUP if regions > 1 else Home.LOCAL
        indexed = bool(declaration.suffix) and not self._is_constantly_indexed(name)
        if users <= 1 and not indexed:
            return Home.LOCAL
        if repeatable:
            return Home.AGAIN
        if declaration.suffix and self._is_always_subscripted(declaration):
            self.storage.spread.add(name)
        return Home.GROUP if regions > 1 else Home.ROW

    def _can_repeat(self, name: str) -> bool:
        declaration = self.storage.declarations[name]
        if declaration.initializer is None or declaration.suffix or name in self.variables.changed:
            return False
        return self.variables.is_pure(declaration.initializer)

    def _add_dependencies(self, names: set[str], again: set[str]) -> None:
        """A variable declared again reads others there, so those are used there too."""
        pending = names & again
        while pending:
            declaration = self.storage.declarations[pending.pop()]
            more = names_in(declaration.initializer or []) - names
            names |= more
            pending |= more & again

    def _check_storable(self, declaration: Declaration) -> None:
        if {"auto", "&"} & {*declaration.type}:
            raise UnknownForm(f"'{declaration.name}' outlives its loop and has no plain type")

    def _is_constantly_indexed(self, name: str) -> bool:
        constants = self.unrolled | self.integers.keys()
        declaration = self.storage.declarations[name]
        return all(
            subscripts_are_constant(name, place.tokens, constants | names_in(declaration.suffix))
            for place in self.places
        )

    def _is_always_subscripted(self, declaration: Declaration) -> bool:
        dimensions = declaration.suffix.count("[")
        for place in self.places:
            for index, token in enumerate(place.tokens):
                if token != declaration.name:
                    continue
                end = index + 1
                for _ in range(dimensions):
                    if place.tokens[end : end + 1] != ["["]:
                        return False
                    end = closing_bracket(place.tokens, end) + 1
        return True


def plan_storage(items: Sequence[Item], variables: Variables, integers: Mapping[str, int]) -> Storage:
    """Decides the home of every variable of the items.

    Raises:
        UnknownForm: A variable that must outlive its loop has a type that can't be stored.
    """
    planner = _Planner(variables, integers)
    for number, region in enumerate(regions_of(items)):
        for piece in region.pieces:
            planner.visit(piece, number)
    return planner.plan()
