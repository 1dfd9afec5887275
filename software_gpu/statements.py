"""The statements of a kernel's body as a tree, every local variable under a name of its own.

Expressions stay lists of tokens: the region form needs to know which names they use and change, not what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from software_gpu.msl_parser import is_name

__all__ = [
    "Block",
    "Declaration",
    "For",
    "If",
    "Simple",
    "Statement",
    "UnknownForm",
    "While",
    "after_template_arguments",
    "assigned_names",
    "closing_bracket",
    "leaves",
    "names_in",
    "split_arguments",
    "tokens_of",
]

_ASSIGNMENTS = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--"})
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class UnknownForm(Exception):
    """The body has a form that can't be split into regions; fibers run it."""


@dataclass(eq=False)
class Simple:
    """An expression statement, a jump, or anything else up to a semicolon, which is not part of `tokens`."""

    tokens: list[str]


@dataclass(eq=False)
class Declaration:
    """`type name suffix = initializer;`. `is_list` marks one in braces or parentheses."""

    type: list[str]
    name: str
    suffix: list[str]
    initializer: list[str] | None
    is_list: bool = False


@dataclass(eq=False)
class Block:
    body: list[Statement]


@dataclass(eq=False)
class If:
    condition: list[str]
    then: list[Statement]
    otherwise: list[Statement]


@dataclass(eq=False)
class For:
    init: Statement | None
    condition: list[str]
    step: list[str]
    body: list[Statement]


@dataclass(eq=False)
class While:
    condition: list[str]
    body: list[Statement]


Statement = Simple | Declaration | Block | If | For | While


def names_in(tokens: Sequence[str]) -> set[str]:
    """Names that may be variables: not members, not qualified."""
    found = set()
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else ""
        if is_name(token) and before not in {".", "->", "::"}:
            found.add(token)
    return found


def assigned_names(tokens: Sequence[str], callees: Mapping[str, set[int]], pointers: set[str]) -> set[str]:
    """Names that an expression changes: assigned, stepped, address taken, or passed to a function that might.

    Args:
        callees: For each function of the source, the positions of arguments that it may change.
        pointers: Names through which a store changes something else.
    """
    found = set()
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else ";"
        if callees.get(token):
            arguments = _call_arguments(tokens, index + 1)
            found |= {name for i, part in enumerate(arguments) if i in callees[token] for name in names_in(part)}
        if not is_name(token) or before in {".", "->", "::"}:
            continue
        takes_address = before == "&" and not (index > 1 and (is_name(tokens[index - 2]) or tokens[index - 2] in ")]"))
        if before in {"++", "--"} or takes_address:
            found.add(token)
            continue
        after = index + 1
        if token in pointers and after < len(tokens) and tokens[after] in {"[", "->"}:
            continue
        while after < len(tokens) and tokens[after] in {"[", "."}:
            after = closing_bracket(tokens, after) + 1 if tokens[after] == "[" else after + 2
        if after < len(tokens) and tokens[after] in _ASSIGNMENTS:
            found.add(token)
    return found


def _call_arguments(tokens: Sequence[str], after_name: int) -> list[list[str]]:
    """Arguments of a call, whose function may be followed by template arguments."""
    opening = after_name
    if tokens[opening : opening + 1] == ["<"]:
        opening = after_template_arguments(tokens, opening)
    if tokens[opening : opening + 1] != ["("]:
        return []
    return split_arguments(tokens[opening + 1 : closing_bracket(tokens, opening)])


def split_arguments(tokens: Sequence[str]) -> list[list[str]]:
    """Parts between commas that stand in no bracket; angle brackets, which may be comparisons, don't count."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def tokens_of(statement: Statement | None) -> list[str]:
    """All tokens of a statement, enough to look for names in."""
    match statement:
        case None:
            return []
        case Simple(tokens):
            return tokens
        case Declaration():
            return [*statement.type, statement.name, *statement.suffix, *(statement.initializer or [])]
        case Block(body):
            return [token for inner in body for token in tokens_of(inner)]
        case If(condition, then, otherwise):
            return [*condition, *(token for inner in [*then, *otherwise] for token in tokens_of(inner))]
        case For(init, condition, step, body):
            inner = [token for inner in body for token in tokens_of(inner)]
            return [*tokens_of(init), *condition, *step, *inner]
        case While(condition, body):
            return [*condition, *(token for inner in body for token in tokens_of(inner))]


def leaves(statement: Statement) -> Iterator[Simple | Declaration]:
    """Statements without parts, in order; heads of loops and branches are left out."""
    match statement:
        case Simple() | Declaration():
            yield statement
        case If(_, then, otherwise):
            for inner in [*then, *otherwise]:
                yield from leaves(inner)
        case Block(body) | For(_, _, _, body) | While(_, body):
            for inner in body:
                yield from leaves(inner)


def closing_bracket(tokens: Sequence[str], opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    opener, closer = tokens[opening], _CLOSING[tokens[opening]]
    depth = 0
    for index in range(opening, len(tokens)):
        depth += (tokens[index] == opener) - (tokens[index] == closer)
        if depth == 0:
            return index
    raise UnknownForm(f"'{opener}' is never closed")


def after_template_arguments(tokens: Sequence[str], opening: int) -> int:
    """Index behind the angle bracket that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(tokens)):
        depth += {"<": 1, ">": -1, ">>": -2}.get(tokens[index], 0)
        if depth <= 0:
            return index + 1 if depth == 0 else len(tokens)
    return len(tokens)
