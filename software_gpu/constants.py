"""Integer constants of a source, and how often loops over them run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from npu_compiler.integers import ceil_div
from software_gpu.msl_parser import Token
from software_gpu.statements import Block, Declaration, For, If, Statement, While

__all__ = ["declared_names", "evaluate", "integer_constants", "local_constants", "loop_trips", "own_trips"]

_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*\Z")
UNKNOWN_TRIPS = 1 << 30


def integer_constants(tokens: Sequence[Token]) -> dict[str, int]:
    """Values of `constant`, `constexpr` and enumerator definitions outside functions that are plain integers."""
    found: dict[str, int] = {}
    depth, is_enum = 0, False
    for index, token in enumerate(tokens):
        depth += (token.text == "{") - (token.text == "}")
        is_enum = token.text == "enum" or (is_enum and token.text not in {"}", ";"})
        if token.text != "=" or depth > is_enum:  # a function's own variables, which may change, are none
            continue
        end = index + 1
        while end < len(tokens) and tokens[end].text not in {";", ",", "}"}:
            end += 1
        value = evaluate([part.text for part in tokens[index + 1 : end]], found)
        if value is not None:
            found[tokens[index - 1].text] = value
    return found


def local_constants(body: Sequence[Statement], known: Mapping[str, int]) -> dict[str, int]:
    """The known constants that no variable of a body hides, and those that it declares."""
    hidden = declared_names(body)
    found = {name: value for name, value in known.items() if name not in hidden}
    for statement in body:
        if isinstance(statement, Declaration) and {"const", "constexpr"} & {*statement.type} and statement.initializer:
            value = evaluate(statement.initializer, found)
            if value is not None:
                found[statement.name] = value
    return found


def declared_names(body: Sequence[Statement]) -> set[str]:
    """Names of all variables that a body declares, those of loops included."""
    found: set[str] = set()
    for statement in body:
        match statement:
            case Declaration(name=name):
                found.add(name)
            case For(init, _, _, inner):
                found |= declared_names([*([init] if init else []), *inner])
            case Block(inner) | While(_, inner):
                found |= declared_names(inner)
            case If(_, then, otherwise):
                found |= declared_names([*then, *otherwise])
    return found


def evaluate(tokens: Sequence[str], known: Mapping[str, int]) -> int | None:
    """The value of an expression of non-negative integers, + - * / % and brackets; None when it is anything else."""
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def advance() -> str:
        nonlocal position
        position += 1
        return tokens[position - 1]

    def primary() -> int:
        token = advance() if peek() else ""
        if token == "(":
            value = total()
            if peek() != ")":
                raise ValueError
            advance()
            return value
        literal = _INTEGER.match(token)
        return int(literal[1], 0) if literal else known[token]

    def product() -> int:
        value = primary()
        while peek() in {"*", "/", "%"}:
            operator, right = advance(), primary()
            value = value * right if operator == "*" else value // right if operator == "/" else value % right
        return value

    def total() -> int:
        value = product()
        while peek() in {"+", "-"}:
            value = value + product() if advance() == "+" else value - product()
        return value

    try:
        value = total()
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    return value if position == len(tokens) else None


def own_trips(loop: For, known: Mapping[str, int]) -> int:
    """How often a loop of the form `for (T i = 0; i < 4; ++i)` runs; UNKNOWN_TRIPS for any other."""
    if not isinstance(loop.init, Declaration) or loop.condition[:2] != [loop.init.name, "<"]:
        return UNKNOWN_TRIPS
    name = loop.init.name
    stepped = loop.step[2:] if loop.step[:2] == [name, "+="] else ["1"]
    if stepped == ["1"] and loop.step not in (["++", name], [name, "++"], [name, "+=", "1"]):
        return UNKNOWN_TRIPS
    start = evaluate(loop.init.initializer or [], known)
    end, step = evaluate(loop.condition[2:], known), evaluate(stepped, known)
    if start is None or end is None or not step:
        return UNKNOWN_TRIPS
    return max(0, ceil_div(end - start, step))


def loop_trips(statement: Statement, known: Mapping[str, int]) -> int:
    """How many times the innermost statements of a loop run in all, nested loops included."""
    match statement:
        case For(body=body):
            inside = max((loop_trips(inner, known) for inner in body), default=1)
            return min(UNKNOWN_TRIPS, own_trips(statement, known) * max(1, inside))
        case While():
            return UNKNOWN_TRIPS
        case Block(body):
            return max((loop_trips(inner, known) for inner in body), default=1)
        case If(_, then, otherwise):
            return max((loop_trips(inner, known) for inner in [*then, *otherwise]), default=1)
        case _:
            return 1
