"""Splits a kernel's body into regions between barriers, and those into pieces that lanes run independently.

The region form runs a threadgroup without fibers. Between two barriers the simdgroups ("rows") are independent, so a
region is a loop over rows; within a row, statements that need no other lane are a loop over lanes, which clang
vectorises. Loops whose head the lanes share are taken out of the loop over lanes. Compare pocl's work-item loops
(Jääskeläinen et al., 2015); here a simdgroup's collectives and matrices stand between the loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from software_gpu.constants import declared_names, loop_trips
from software_gpu.region_pieces import (
    CollectivePiece,
    GroupBlock,
    GroupCode,
    Item,
    Lanes,
    Masked,
    Piece,
    Region,
    RowBlock,
    RowCode,
    RowReturn,
    Strided,
    has_row_return,
)
from software_gpu.region_storage import RESULT
from software_gpu.statements import (
    Block,
    Declaration,
    For,
    If,
    Simple,
    Statement,
    UnknownForm,
    While,
    closing_bracket,
    leaves,
    names_in,
    split_arguments,
    tokens_of,
)
from software_gpu.variables import COLLECTIVES, GROUP, LANE, ROW, Variables, is_threadgroup_variable

__all__ = ["split_into_regions"]

_LANE_TRIPS = 64  # a loop of this many steps in all stays inside the loop over lanes, unrolled
_JUMPS = frozenset({"break", "continue", "return"})


def split_into_regions(body: Sequence[Statement], variables: Variables, integers: Mapping[str, int]) -> list[Item]:
    """The items of a kernel's body.

    Args:
        integers: Values of integer constants by name.

    Raises:
        UnknownForm: A barrier or collective stands where threads of a group may part.
    """
    needed = _needed_at_group_level(body, variables)
    return _Splitter(variables, integers, needed).items(body)


def _needed_at_group_level(body: Sequence[Statement], variables: Variables) -> set[str]:
    """Names that decide loops and branches around barriers, and what those names are computed from."""
    needed: set[str] = set()
    for statement in body:
        _collect_needed(statement, variables, needed)
    while True:
        more = set(needed)
        for name in needed & variables.declarations.keys():
            more |= names_in(variables.declarations[name].initializer or [])
        if more == needed:
            return needed
        needed = more


def _collect_needed(statement: Statement, variables: Variables, needed: set[str]) -> None:
    inner: list[Statement] = []
    match statement:
        case Declaration(name=name, initializer=initializer):
            if name in variables.changed and variables.levels.get(name, GROUP) == GROUP:
                needed |= names_in(initializer or [])
        case Simple(tokens):
            assigned = variables.assigned(tokens)
            if assigned and all(variables.levels.get(name, GROUP) == GROUP for name in assigned):
                needed |= names_in(tokens)
        case If(condition, then, otherwise):
            if variables.has_barrier(statement) or _is_jump_of_group(statement, variables):
                needed |= names_in(condition)
                inner = [*then, *otherwise]
        case For(init, condition, step, body) if variables.has_barrier(statement):
            needed |= names_in([*tokens_of(init), *condition, *step])
            inner = body
        case While(condition, body) if variables.has_barrier(statement):
            needed |= names_in(condition)
            inner = body
        case Block(body) if variables.has_barrier(statement):
            inner = body
    for part in inner:
        _collect_needed(part, variables, needed)


def _is_jump_of_group(statement: If, variables: Variables) -> bool:
    jumps = all(isinstance(leaf, Simple) and leaf.tokens[0] in _JUMPS for leaf in leaves(statement))
    return jumps and variables.level(statement.condition) == GROUP


@dataclass
class _Splitter:
    variables: Variables
    integers: Mapping[str, int]
    needed_at_group_level: set[str]
    declared_in_rows: set[str] = field(default_factory=set)
    temporaries: int = 0

    # --- group level ---

    def items(self, body: Sequence[Statement]) -> list[Item]:
        found: list[Item] = []
        is_open = False  # whether the last item is a region that may grow
        for statement in body:
            if isinstance(statement, Simple) and "threadgroup_barrier" in statement.tokens:
                _check_barrier(statement.tokens)
                is_open = False
            elif self.variables.has_barrier(statement):
                found.append(self._group_block(statement))
                is_open = False
            elif self._is_movable(statement):
                found.insert(len(found) - is_open, GroupCode(statement))
            elif self._is_group_code(statement):
                found.append(GroupCode(statement))
                is_open = False
            else:
                if not is_open:
                    found.append(Region([]))
                    is_open = True
                region = found[-1]
                assert isinstance(region, Region)
                self.declared_in_rows |= declared_names([statement])
                region.pieces += self.pieces([statement], in_loop=False, after=region.pieces)
        return found

    def _group_block(self, statement: Statement) -> GroupBlock:
        if not isinstance(statement, If | For | While | Block):
            raise UnknownForm("a barrier inside an expression")
        if _head_level(statement, self.variables) != GROUP:
            raise UnknownForm("a barrier in a branch or loop that threads may take differently")
        if isinstance(statement, If):
            return GroupBlock(statement, self.items(statement.then), self.items(statement.otherwise))
        return GroupBlock(statement, self.items(statement.body))

    def _is_movable(self, statement: Statement) -> bool:
        """Whether it computes a constant of the group from such constants, so that it may run early."""
        match statement:
            case Simple(tokens):
                return tokens[0] in {"typedef", "using", "static_assert"}
            case Declaration(name=name, initializer=initializer):
                if is_threadgroup_variable(statement):
                    return True
                if self._level(name) != GROUP or name in self.variables.changed or name in self.variables.matrices:
                    return False
                values = [token for token in initializer or [] if not (statement.is_list and token in "{}")]
                if initializer is None or names_in(values) & self.declared_in_rows:
                    return False
                return self.variables.is_pure(values)
            case _:
                return False

    def _is_group_code(self, statement: Statement) -> bool:
        match statement:
            case Declaration(name=name):
                if self._level(name) != GROUP or name in self.variables.matrices:
                    return False
                return name in self.variables.changed or name in self.needed_at_group_level
            case Simple(tokens):
                assigned = self.variables.assigned(tokens)
                if tokens[0] in _JUMPS:
                    return True
                return bool(assigned) and all(self._level(name) == GROUP for name in assigned)
            case If():
                return _is_jump_of_group(statement, self.variables)
            case _:
                return False

    # --- row level ---

    def pieces(self, body: Sequence[Statement], *, in_loop: bool, after: list[Piece] | None = None) -> list[Piece]:
        """Pieces of statements without threadgroup barriers.

        Args:
            in_loop: Whether a loop of the row surrounds them, which jumps would refer to.
            after: Pieces before them, the last of which may take more statements.
        """
        found: list[Piece] = []
        for statement in body:
            made = self._piece(statement, in_loop)
            previous = found[-1] if found else (after[-1] if after else None)
            first = made[0] if made else None
            if isinstance(first, Lanes) and isinstance(previous, Lanes):
                previous.statements += first.statements
                made = made[1:]
            found += made
        return found

    def _piece(self, statement: Statement, in_loop: bool) -> list[Piece]:
        variables = self.variables
        if isinstance(statement, Simple | Declaration):
            return self._leaf(statement, in_loop)
        if isinstance(statement, If):
            return self._branch(statement, in_loop)
        together = variables.is_row_synchronizing(statement)
        if isinstance(statement, Block):
            if together or self._has_hoistable_loop(statement):
                return [RowBlock(statement, self.pieces(statement.body, in_loop=in_loop))]
            return self._lanes(statement, in_loop)
        if _head_level(statement, variables) <= ROW:
            if together or (isinstance(statement, For) and self._is_hoistable(statement)):
                return [RowBlock(statement, self.pieces(statement.body, in_loop=True))]
        elif together:
            raise UnknownForm("a collective in a loop that lanes of a simdgroup may leave at different times")
        strided = self._strided(statement) if isinstance(statement, For) else None
        return [strided] if strided else self._lanes(statement, in_loop)

    def _leaf(self, statement: Simple | Declaration, in_loop: bool) -> list[Piece]:
        tokens = tokens_of(statement)
        if any(token in COLLECTIVES for token in tokens):
            return self._extract_collective(statement, in_loop)
        if tokens[0] == "simdgroup_barrier" or tokens == ["metal", "::", "simdgroup_barrier"]:
            return [RowBlock(Block([]), [])]  # ends the loop over lanes before it
        if self.variables.has_matrix(tokens):
            return [RowCode(statement)]
        if isinstance(statement, Declaration):
            shared = self._level(statement.name) <= ROW and not (statement.suffix and statement.initializer is None)
            return [RowCode(statement)] if shared else [Lanes([statement])]
        if tokens[0] in {"break", "continue"}:
            raise UnknownForm("a jump that only some lanes may take")
        assigned = self.variables.assigned(tokens)
        if assigned and all(self._level(name) <= ROW for name in assigned):
            return [RowCode(statement)]
        return [Lanes([statement])]

    def _branch(self, statement: If, in_loop: bool) -> list[Piece]:
        level = self.variables.level(statement.condition)
        if any(token in COLLECTIVES for token in statement.condition):
            raise UnknownForm("a collective in a condition")
        found = list(leaves(statement))
        jumps = all(isinstance(leaf, Simple) and leaf.tokens[0] in _JUMPS for leaf in found)
        if jumps and level <= ROW and not statement.otherwise and len(statement.then) == 1:
            jump = statement.then[0]
            if isinstance(jump, Simple) and jump.tokens == ["return"]:
                return [RowBlock(statement, [RowReturn()])]
            if isinstance(jump, Simple) and in_loop:
                return [RowBlock(statement, [RowCode(jump)])]
        if not (self.variables.is_row_synchronizing(statement) or self._has_hoistable_loop(statement)):
            return self._lanes(statement, in_loop)
        then = self.pieces(statement.then, in_loop=in_loop)
        otherwise = self.pieces(statement.otherwise, in_loop=in_loop)
        if level <= ROW:
            return [RowBlock(statement, then, otherwise)]
        if any(self.variables.has_matrix(tokens_of(leaf)) for leaf in found):
            raise UnknownForm("a simdgroup matrix in a branch that lanes may take differently")
        if any(has_row_return(piece) for piece in [*then, *otherwise]):
            raise UnknownForm("a return of a simdgroup in a branch that lanes may take differently")
        return [Masked(self._temporary("msl_mask_"), statement.condition, then, otherwise)]

    def _lanes(self, statement: Statement, in_loop: bool) -> list[Piece]:
        if _jumps_outward(statement):
            raise UnknownForm("a jump that only some lanes may take")
        return [Lanes([statement])]

    def _extract_collective(self, statement: Simple | Declaration, in_loop: bool) -> list[Piece]:
        """Takes the innermost collective out of a statement; the rest is read again."""
        tokens = statement.tokens if isinstance(statement, Simple) else (statement.initializer or [])
        at = max((i for i, token in enumerate(tokens) if token in COLLECTIVES), default=-1)
        if at < 0 or tokens[at + 1] != "(":
            raise UnknownForm("a collective that is not plainly called")
        end = closing_bracket(tokens, at + 1) + 1
        arguments = split_arguments(tokens[at + 2 : end - 1])
        if {"?", "&&", "||"} & {*tokens[:at], *tokens[end:]}:
            raise UnknownForm("a collective that is evaluated only sometimes")
        collective = COLLECTIVES[tokens[at]]
        if len(arguments) != collective.arguments:
            raise UnknownForm(f"{tokens[at]} with {len(arguments)} arguments")
        name = self._temporary(RESULT)
        self.variables.levels[name] = collective.level
        rest = [*tokens[:at], name, *tokens[end:]]
        if isinstance(statement, Simple):
            remaining: Simple | Declaration = Simple(rest)
        else:
            remaining = Declaration(statement.type, statement.name, statement.suffix, rest, statement.is_list)
            self.variables.declarations[statement.name] = remaining
        piece = CollectivePiece(name, collective, arguments[0], arguments[1] if len(arguments) > 1 else [])
        return [piece, *self._leaf(remaining, in_loop)]

    # --- loops that leave the loop over lanes ---

    def _has_hoistable_loop(self, statement: Statement) -> bool:
        match statement:
            case For():
                hoisted = _head_level(statement, self.variables) <= ROW and self._is_hoistable(statement)
                return hoisted or self._strided(statement) is not None
            case Block(body):
                return any(self._has_hoistable_loop(inner) for inner in body)
            case If(_, then, otherwise):
                return any(self._has_hoistable_loop(inner) for inner in [*then, *otherwise])
            case _:
                return False

    def _is_hoistable(self, loop: For) -> bool:
        if not isinstance(loop.init, Declaration) or loop.init.name in self.variables.changed:
            return False
        if any(isinstance(leaf, Simple) and leaf.tokens[0] in {"break", "return"} for leaf in leaves(loop)):
            return False
        if any(_jumps_outward(inner) for inner in loop.body):
            return False
        return loop_trips(loop, self.integers) > _LANE_TRIPS

    def _strided(self, loop: For) -> Strided | None:
        variable, variables = loop.init, self.variables
        if not isinstance(variable, Declaration) or not self._is_hoistable(loop) or variable.initializer is None:
            return None
        name, step = variable.name, loop.step
        if step in (["++", name], [name, "++"]):
            stride = ["1"]
        elif step[:2] == [name, "+="]:
            stride = step[2:]
        else:
            return None
        bound = loop.condition[2:]
        shared = variables.level(bound) <= ROW and variables.level(stride) <= ROW and name not in [*bound, *stride]
        parts = (variable.initializer, bound, stride)
        if loop.condition[:2] != [name, "<"] or not shared or not all(variables.is_pure(part) for part in parts):
            return None
        return Strided(variable, variable.initializer, bound, stride, self.pieces(loop.body, in_loop=False))

    def _level(self, name: str) -> int:
        return self.variables.levels.get(name, GROUP)

    def _temporary(self, start: str) -> str:
        self.temporaries += 1
        return f"{start}{self.temporaries}"


def _check_barrier(tokens: Sequence[str]) -> None:
    """A barrier stands alone; what stands beside one would be lost."""
    at = tokens.index("threadgroup_barrier")
    alone = list(tokens[:at]) in ([], ["metal", "::"]) and tokens[at + 1 : at + 2] == ["("]
    if not alone or closing_bracket(tokens, at + 1) != len(tokens) - 1:
        raise UnknownForm("a barrier inside an expression")


def _head_level(statement: Statement, variables: Variables) -> int:
    match statement:
        case If(condition) | While(condition):
            return variables.level(condition)
        case For(init, condition, step):
            return variables.level([*tokens_of(init), *condition, *step])
        case Block():
            return GROUP
        case _:
            return LANE


def _jumps_outward(statement: Statement) -> bool:
    """Whether a break or continue in it refers to a loop around it."""
    match statement:
        case Simple(tokens):
            return tokens[0] in {"break", "continue"}
        case If(_, then, otherwise):
            return any(_jumps_outward(inner) for inner in [*then, *otherwise])
        case Block(body):
            return any(_jumps_outward(inner) for inner in body)
        case _:
            return False
