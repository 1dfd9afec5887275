"""Which threads share a variable's value: all of the threadgroup, those of a simdgroup, or none.

The levels decide where the region form keeps a variable and at which level it runs a statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from software_gpu.msl_parser import Kernel, is_name
from software_gpu.statements import (
    Block,
    Declaration,
    For,
    If,
    Simple,
    Statement,
    While,
    assigned_names,
    closing_bracket,
    leaves,
    names_in,
    tokens_of,
)

__all__ = [
    "BARRIERS",
    "COLLECTIVES",
    "GROUP",
    "LANE",
    "ROW",
    "Collective",
    "Variables",
    "analyse",
    "is_matrix_name",
    "is_threadgroup_variable",
]

GROUP, ROW, LANE = 0, 1, 2

_ROLE_LEVELS = {
    "thread_position_in_grid": LANE,
    "thread_position_in_threadgroup": LANE,
    "thread_index_in_threadgroup": LANE,
    "thread_index_in_simdgroup": LANE,
    "thread_index_in_quadgroup": LANE,
    "quadgroup_index_in_threadgroup": LANE,
    "simdgroup_index_in_threadgroup": ROW,
}


@dataclass(frozen=True)
class Collective:
    """A simdgroup function: the operation in the headers, its arguments, who shares its result."""

    operation: str
    arguments: int
    level: int


COLLECTIVES = {
    "simd_sum": Collective("sum", 1, ROW),
    "simd_product": Collective("product", 1, ROW),
    "simd_max": Collective("maximum", 1, ROW),
    "simd_min": Collective("minimum", 1, ROW),
    "simd_and": Collective("bit_and", 1, ROW),
    "simd_or": Collective("bit_or", 1, ROW),
    "simd_xor": Collective("bit_xor", 1, ROW),
    "simd_broadcast_first": Collective("first_active", 1, ROW),
    "simd_broadcast": Collective("shuffle", 2, ROW),
    "simd_shuffle": Collective("shuffle", 2, LANE),
    "simd_shuffle_xor": Collective("shuffle_xor", 2, LANE),
    "simd_shuffle_down": Collective("shuffle_down", 2, LANE),
    "simd_shuffle_up": Collective("shuffle_up", 2, LANE),
    "simd_shuffle_rotate_down": Collective("rotate_down", 2, LANE),
    "simd_shuffle_rotate_up": Collective("rotate_up", 2, LANE),
    "simd_prefix_inclusive_sum": Collective("prefix_sum<true>", 1, LANE),
    "simd_prefix_exclusive_sum": Collective("prefix_sum<false>", 1, LANE),
    "quad_sum": Collective("quad_add", 1, LANE),
    "quad_max": Collective("quad_maximum", 1, LANE),
    "quad_min": Collective("quad_minimum", 1, LANE),
    "quad_broadcast": Collective("quad_move", 2, LANE),
}
BARRIERS = frozenset({"threadgroup_barrier", "simdgroup_barrier"})
_MATRIX = re.compile(r"(simdgroup_(?!barrier|index)\w+|make_filled_simdgroup_matrix)\Z")
_PURE_CALLS = re.compile(
    r"(min|max|clamp|abs|select|sizeof|static_cast|(bool|char|uchar|short|ushort|int|uint|long|ulong|float|half|size_t)\d?)\Z"
)


def is_threadgroup_variable(declaration: Declaration) -> bool:
    """Whether it places a variable in threadgroup memory (a pointer to there is an ordinary variable)."""
    return "threadgroup" in declaration.type and "*" not in declaration.type


def is_matrix_name(token: str) -> bool:
    """Whether a token names a simdgroup matrix type or function."""
    return _MATRIX.match(token) is not None


@dataclass
class Variables:
    """What is known of the names in a kernel.

    Attributes:
        levels: Who shares the value of a name; a name that isn't here is shared by all.
        declarations: Local variables.
        changed: Names whose value is not always the same: local variables assigned after their declaration (a loop
            variable only if its body assigns it), variables in threadgroup memory, references to device memory.
        constants: Names of pointers and structs in constant memory, whose content never changes.
        callees: For each function of the source, the positions of arguments that it may change.
    """

    callees: Mapping[str, set[int]]
    constants: set[str]
    levels: dict[str, int] = field(default_factory=dict)
    declarations: dict[str, Declaration] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    matrices: set[str] = field(default_factory=set)
    pointers: set[str] = field(default_factory=set)

    def level(self, tokens: Iterable[str]) -> int:
        """The level of an expression: that of its most private name, arguments of reductions left out."""
        visible = _without_reductions(list(tokens))
        levels = [self.levels.get(name, GROUP) for name in names_in(visible)]
        levels += [COLLECTIVES[token].level for token in visible if token in COLLECTIVES]
        return max(levels, default=GROUP)

    def has_barrier(self, statement: Statement) -> bool:
        return "threadgroup_barrier" in tokens_of(statement)

    def has_matrix(self, tokens: Iterable[str]) -> bool:
        return any(token in self.matrices or is_matrix_name(token) for token in tokens)

    def is_row_synchronizing(self, statement: Statement) -> bool:
        """Whether lanes of a simdgroup work together in it."""
        tokens = tokens_of(statement)
        return any(token in COLLECTIVES or token == "simdgroup_barrier" for token in tokens) or self.has_matrix(tokens)

    def assigned(self, tokens: Sequence[str]) -> set[str]:
        """Local variables that an expression changes."""
        return assigned_names(tokens, self.callees, self.pointers) & self.declarations.keys()

    def is_pure(self, tokens: Sequence[str]) -> bool:
        """Whether an expression may be evaluated again, anywhere, with the same result."""
        for index, token in enumerate(tokens):
            before = tokens[index - 1] if index else "("
            after = tokens[index + 1] if index + 1 < len(tokens) else ""
            if token in {"=", "++", "--", "+=", "-=", "*=", "->", "{"} or token in COLLECTIVES or token in self.callees:
                return False
            if token == "[" and before not in self.constants:
                return False
            operand_before = is_name(before) or before in {")", "]"} or before[0].isdigit()
            if token in {"*", "&"} and not operand_before:
                return False
            if after == "(" and is_name(token) and not _PURE_CALLS.match(token):
                return False
        return not (names_in(tokens) & self.changed)


def _without_reductions(tokens: list[str]) -> list[str]:
    """The tokens without the arguments of functions whose result all lanes of a simdgroup share."""
    for index, token in enumerate(tokens):
        shares = token in COLLECTIVES and COLLECTIVES[token].level == ROW
        if shares and tokens[index + 1 : index + 2] == ["("]:
            end = closing_bracket(tokens, index + 1)
            return [*tokens[: index + 1], *_without_reductions(tokens[end + 1 :])]
    return tokens


def analyse(kernel: Kernel, body: Sequence[Statement], callees: Mapping[str, set[int]]) -> Variables:
    """Levels of all variables, raised until nothing contradicts them."""
    constants = {parameter.name for parameter in kernel.parameters if parameter.space == "constant"}
    variables = Variables(callees, constants)
    for parameter in kernel.parameters:
        variables.levels[parameter.name] = _ROLE_LEVELS.get(parameter.role, GROUP)
        if parameter.type.endswith("*"):
            variables.pointers.add(parameter.name)
        elif parameter.is_reference and parameter.space != "constant":
            variables.changed.add(parameter.name)
    for statement in body:
        _collect(statement, variables)
    while True:
        before = dict(variables.levels)
        for statement in body:
            _raise_levels(statement, GROUP, variables)
        if variables.levels == before:
            return variables


def _collect(statement: Statement, variables: Variables) -> None:
    for declaration in _declarations(statement):
        if is_threadgroup_variable(declaration):
            if not declaration.suffix:  # an array's name stands for its address, which stays
                variables.changed.add(declaration.name)
            continue
        variables.declarations[declaration.name] = declaration
        if "*" in declaration.type:
            variables.pointers.add(declaration.name)
            given = names_in(declaration.initializer or []) & variables.declarations.keys()  # may change through it
            variables.changed |= {name for name in given if variables.declarations[name].suffix}
        if any(is_matrix_name(token) for token in declaration.type):
            variables.matrices.add(declaration.name)
    for tokens in _expressions(statement):
        variables.changed |= variables.assigned(tokens)


def _declarations(statement: Statement) -> list[Declaration]:
    match statement:
        case Declaration():
            return [statement]
        case Simple():
            return []
        case If(_, then, otherwise):
            return [found for inner in [*then, *otherwise] for found in _declarations(inner)]
        case For(init, _, _, body):
            own = _declarations(init) if init else []
            return own + [found for inner in body for found in _declarations(inner)]
        case Block(body) | While(_, body):
            return [found for inner in body for found in _declarations(inner)]


def _expressions(statement: Statement) -> list[list[str]]:
    """Expressions that may assign; the step of a loop is left out for the loop's own variable."""
    match statement:
        case Simple(tokens):
            return [tokens]
        case Declaration():
            return [statement.initializer] if statement.initializer else []
        case If(condition, then, otherwise):
            return [condition] + [found for inner in [*then, *otherwise] for found in _expressions(inner)]
        case For(init, condition, step, body):
            found = [condition] + [found for inner in body for found in _expressions(inner)]
            own = [init.name] if isinstance(init, Declaration) else []
            steps_own_variable = names_in(step) & set(own) and "," not in step
            return found + ([] if steps_own_variable else [step]) + (_expressions(init) if init else [])
        case Block(body):
            return [found for inner in body for found in _expressions(inner)]
        case While(condition, body):
            return [condition] + [found for inner in body for found in _expressions(inner)]


def _raise_levels(statement: Statement, control: int, variables: Variables) -> None:
    """Raises what a statement assigns to the level of its values and of what decides whether it runs."""
    match statement:
        case Simple(tokens):
            _assign(variables.assigned(tokens), max(control, variables.level(tokens)), variables)
        case Declaration():
            _declare(statement, variables)
        case Block(body):
            for inner in body:
                _raise_levels(inner, control, variables)
        case If(condition, then, otherwise):
            inside = max(control, _own_control(statement, variables), variables.level(condition))
            for inner in [*then, *otherwise]:
                _raise_levels(inner, inside, variables)
        case For(init, condition, step, body):
            if init:
                _raise_levels(init, control, variables)
            head = variables.level([*tokens_of(init), *condition, *step])
            _assign(variables.assigned(step), head, variables)
            inside = max(control, _own_control(statement, variables), head, _jump_level(body, variables))
            for inner in body:
                _raise_levels(inner, inside, variables)
        case While(condition, body):
            inside = max(control, _own_control(statement, variables), variables.level(condition))
            inside = max(inside, _jump_level(body, variables))
            for inner in body:
                _raise_levels(inner, inside, variables)


def _own_control(statement: Statement, variables: Variables) -> int:
    """The level at which a loop or branch runs, whatever its head says."""
    if variables.has_barrier(statement):
        return GROUP
    return ROW if variables.is_row_synchronizing(statement) else LANE


def _jump_level(body: Sequence[Statement], variables: Variables) -> int:
    """The level of the conditions under which a loop's body is left early."""
    level = GROUP
    for statement in body:
        if isinstance(statement, If):
            jumps = any(
                isinstance(leaf, Simple) and leaf.tokens[0] in {"break", "continue"} for leaf in leaves(statement)
            )
            if jumps:
                level = max(level, variables.level(statement.condition), _jump_level(statement.then, variables))
        elif isinstance(statement, Block):
            level = max(level, _jump_level(statement.body, variables))
    return level


def _declare(declaration: Declaration, variables: Variables) -> None:
    if is_threadgroup_variable(declaration):
        return
    if declaration.name in variables.matrices:
        level = ROW
    elif declaration.suffix and declaration.name in variables.changed:
        level = LANE
    else:
        level = variables.level(declaration.initializer or [])
    _assign({declaration.name}, level, variables)


def _assign(names: set[str], level: int, variables: Variables) -> None:
    for name in names:
        variables.levels[name] = max(level, variables.levels.get(name, GROUP))
