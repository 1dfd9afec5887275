"""The statements of a kernel's body as a tree, every local variable under a name of its own.

Expressions stay lists of tokens: the region form needs to know which names they use and change, not what they mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from software_gpu.msl_parser import ADDRESS_SPACES, Token, is_name

__all__ = [
    "Block",
    "Declaration",
    "For",
    "If",
    "Simple",
    "Statement",
    "UnknownForm",
    "While",
    "assigned_names",
    "leaves",
    "names_in",
    "parse_body",
    "tokens_of",
]

_QUALIFIERS = ADDRESS_SPACES | {"const", "constexpr", "volatile", "static"}
_INTEGER_WORDS = frozenset({"unsigned", "signed", "long", "short", "int", "char"})
_NOT_TYPES = frozenset(
    {"return", "else", "goto", "case", "default", "break", "continue", "typedef", "using", "struct", "delete", "do"}
)
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
    """`type name suffix = initializer;`. `braces` marks an initialiser in braces or parentheses, taken as a list."""

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
            after = _closing(tokens, after) + 1 if tokens[after] == "[" else after + 2
        if after < len(tokens) and tokens[after] in _ASSIGNMENTS:
            found.add(token)
    return found


def _call_arguments(tokens: Sequence[str], after_name: int) -> list[list[str]]:
    """Arguments of a call, whose function may be followed by template arguments."""
    opening = after_name
    if tokens[opening : opening + 1] == ["<"]:
        opening = _after_template_arguments(tokens, opening)
    if tokens[opening : opening + 1] != ["("]:
        return []
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens[opening + 1 : _closing(tokens, opening)]:
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


def parse_body(body: Sequence[Token], taken: set[str]) -> list[Statement]:
    """The statements of a body in braces.

    Args:
        taken: Names that no local variable may keep, such as those of parameters.

    Raises:
        UnknownForm: It has a statement that this reader doesn't know.
    """
    parser = _Parser([token.text for token in body[1:-1]], taken)
    return parser.statements(len(parser.tokens))


def _closing(tokens: Sequence[str], opening: int) -> int:
    opener, closer = tokens[opening], _CLOSING[tokens[opening]]
    depth = 0
    for index in range(opening, len(tokens)):
        depth += (tokens[index] == opener) - (tokens[index] == closer)
        if depth == 0:
            return index
    raise UnknownForm(f"'{opener}' is never closed")


@dataclass
class _Parser:
    tokens: list[str]
    taken: set[str]
    position: int = 0
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])

    def statements(self, end: int) -> list[Statement]:
        found: list[Statement] = []
        while self.position < end:
            found += self._statement()
        return found

    def _scoped(self, end: int) -> list[Statement]:
        self.scopes.append({})
        found = self.statements(end)
        self.scopes.pop()
        return found

    def _statement(self) -> list[Statement]:
        start = self.tokens[self.position]
        if start == "{":
            return [Block(self._braces())]
        if start == "if":
            return [self._if()]
        if start == "for":
            return [self._for()]
        if start == "while":
            self.position += 1
            return [While(self._parentheses(), _without_continue(self._substatement()))]
        if start in {"switch", "do", "goto", "asm", "struct", "union", "enum"}:
            raise UnknownForm(f"a '{start}' statement")
        end = self._semicolon()
        tokens = self.tokens[self.position : end]
        self.position = end + 1
        return self._declarations(tokens) or ([Simple(self._renamed(tokens))] if tokens else [])

    def _braces(self) -> list[Statement]:
        end = _closing(self.tokens, self.position)
        self.position += 1
        body = self._scoped(end)
        self.position = end + 1
        return body

    def _substatement(self) -> list[Statement]:
        if self.tokens[self.position] == "{":
            return self._braces()
        self.scopes.append({})
        body = self._statement()
        self.scopes.pop()
        return body

    def _parentheses(self) -> list[str]:
        end = _closing(self.tokens, self.position)
        inside = self._renamed(self.tokens[self.position + 1 : end])
        self.position = end + 1
        return inside

    def _if(self) -> If:
        self.position += 1
        if self.tokens[self.position] == "constexpr":
            raise UnknownForm("'if constexpr'")
        condition, then, otherwise = self._parentheses(), self._substatement(), list[Statement]()
        if self.position < len(self.tokens) and self.tokens[self.position] == "else":
            self.position += 1
            otherwise = self._substatement()
        return If(condition, then, otherwise)

    def _for(self) -> For:
        end = _closing(self.tokens, self.position + 1)
        self.position += 2
        self.scopes.append({})
        first = self._semicolon()
        init_tokens = self.tokens[self.position : first]
        declared = self._declarations(init_tokens)
        if len(declared) > 1:
            raise UnknownForm("a 'for' that declares several variables")
        init: Statement | None = declared[0] if declared else None
        if init is None and init_tokens:
            init = Simple(self._renamed(init_tokens))
        self.position = first + 1
        second = self._semicolon()
        condition = self._renamed(self.tokens[self.position : second])
        step = self._renamed(self.tokens[second + 1 : end])
        self.position = end + 1
        body = _without_continue(self._substatement())
        self.scopes.pop()
        return For(init, condition, step, body)

    def _semicolon(self) -> int:
        index = self.position
        while index < len(self.tokens) and self.tokens[index] != ";":
            index = _closing(self.tokens, index) + 1 if self.tokens[index] in _CLOSING else index + 1
        if index == len(self.tokens):
            raise UnknownForm("a statement without a semicolon")
        return index

    def _renamed(self, tokens: Sequence[str]) -> list[str]:
        if "[" in tokens and any(a == "[" and b in {"&", "=", "]"} for a, b in itertools.pairwise(tokens)):
            raise UnknownForm("a lambda expression")
        result = []
        for index, token in enumerate(tokens):
            before = tokens[index - 1] if index else ""
            member = before in {".", "->", "::"}
            result.append(token if member else self._lookup(token))
        return result

    def _lookup(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _declare(self, name: str) -> str:
        unique, number = name, 2
        while unique in self.taken:
            unique, number = f"{name}_{number}", number + 1
        self.taken.add(unique)
        self.scopes[-1][name] = unique
        return unique

    def _declarations(self, tokens: Sequence[str]) -> list[Statement]:
        """Declarations in a statement, one for each declarator; none when it is something else."""
        at = _name_position(tokens)
        if at is None:
            return []
        kind = self._renamed(tokens[:at])
        parts = _split(tokens[at:])
        if len(parts) > 1 and ("*" in kind or "&" in kind):
            raise UnknownForm("several pointers in one declaration")
        return [self._declarator(kind, part) for part in parts]

    def _declarator(self, kind: list[str], part: Sequence[str]) -> Declaration:
        index = 1
        while index < len(part) and part[index] == "[":
            index = _closing(part, index) + 1
        suffix = self._renamed(part[1:index])
        rest = part[index:]
        if not rest:
            return Declaration(kind, self._declare(part[0]), suffix, None)
        is_list = rest[0] in "({" or rest[1] == "{"
        initializer = self._renamed(rest[1:] if rest[0] == "=" else rest)
        return Declaration(kind, self._declare(part[0]), suffix, initializer, is_list)


def _without_continue(body: list[Statement]) -> list[Statement]:
    """A loop's body where `if (c) continue; rest` reads `if (!(c)) { rest }`: no jump, the same work."""
    for index, statement in enumerate(body):
        if not isinstance(statement, If) or statement.otherwise or len(statement.then) != 1:
            continue
        jump = statement.then[0]
        if isinstance(jump, Simple) and jump.tokens == ["continue"]:
            rest = _without_continue(body[index + 1 :])
            return [*body[:index], If(["!", "(", *statement.condition, ")"], rest, [])]
    return body


def _split(tokens: Sequence[str]) -> list[list[str]]:
    """Declarators between commas; angle brackets don't count, so template arguments with commas are not split here."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    if any(len(part) == 0 or not is_name(part[0]) for part in parts):
        raise UnknownForm("a declaration with commas in template arguments")
    return parts


def _name_position(tokens: Sequence[str]) -> int | None:
    """Index of the declared name when the tokens begin with a type and a name."""
    index = 0
    while index < len(tokens) and tokens[index] in _QUALIFIERS:
        index += 1
    if index >= len(tokens) or not is_name(tokens[index]) or tokens[index] in _NOT_TYPES:
        return None
    if tokens[index] in _INTEGER_WORDS:
        while index < len(tokens) and tokens[index] in _INTEGER_WORDS:
            index += 1
    else:
        index += 1
        while index + 1 < len(tokens) and tokens[index] == "::":
            index += 2
        if index < len(tokens) and tokens[index] == "<":
            index = _after_template_arguments(tokens, index)
    while index < len(tokens) and tokens[index] in {"*", "&", *_QUALIFIERS}:
        index += 1
    if index >= len(tokens) or not is_name(tokens[index]) or index == 0:
        return None
    follows = tokens[index + 1] if index + 1 < len(tokens) else ";"
    return index if follows in {"=", ";", "[", ",", "(", "{"} else None


def _after_template_arguments(tokens: Sequence[str], opening: int) -> int:
    depth = 0
    for index in range(opening, len(tokens)):
        depth += (tokens[index] == "<") - (tokens[index] == ">")
        if depth == 0:
            return index + 1
    return len(tokens)
