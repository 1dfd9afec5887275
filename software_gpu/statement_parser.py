"""Reads the tokens of a kernel's body into statements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from software_gpu.helpers import QUALIFIERS, Helper, HelperParameter, plain_type_tokens
from software_gpu.msl_parser import Parameter, Token, is_name, tokenize
from software_gpu.statements import (
    Block,
    Declaration,
    For,
    If,
    Simple,
    Statement,
    UnknownForm,
    While,
    after_template_arguments,
    closing_bracket,
    leaves,
    split_arguments,
)

__all__ = ["parse_body"]

_INTEGER_WORDS = frozenset({"unsigned", "signed", "long", "short", "int", "char"})
_NOT_TYPES = frozenset(
    {"return", "else", "goto", "case", "default", "break", "continue", "typedef", "using", "struct", "delete", "do"}
)


def parse_body(
    body: Sequence[Token], parameters: Sequence[Parameter] = (), helpers: Mapping[str, Helper] | None = None
) -> list[Statement]:
    """The statements of a body in braces.

    Args:
        parameters: Of the kernel, whose names no local variable may keep.
        helpers: Functions whose statements stand in place of their calls.

    Raises:
        UnknownForm: It has a statement that this reader doesn't know.
    """
    kinds = {parameter.name: [token.text for token in tokenize(parameter.type)] for parameter in parameters}
    taken = {token.text for helper in (helpers or {}).values() for token in helper.body if is_name(token.text)}
    parser = _Parser(_texts(body[1:-1]), taken | kinds.keys(), kinds, helpers or {})
    return parser.statements(len(parser.tokens))


def _texts(tokens: Sequence[Token]) -> list[str]:
    """Texts of tokens, where brackets of templates and shifts to the right are told apart no more than in C++."""
    texts: list[str] = []
    end = -1
    for token in tokens:
        if token.text == ">" and texts[-1:] == [">"] and token.start == end:
            texts[-1] = ">>"
        else:
            texts.append(token.text)
        end = token.end
    return texts


@dataclass
class _Parser:
    """
    Attributes:
        taken: Names that no more variables may get.
        kinds: Types of variables, by the names they got.
        foreign: Names that mean something else where the statements will stand.
    """

    tokens: list[str]
    taken: set[str]
    kinds: dict[str, list[str]]
    helpers: Mapping[str, Helper]
    foreign: frozenset[str] = frozenset()
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
        return self._with_calls(tokens) if tokens else []

    def _with_calls(self, tokens: list[str]) -> list[Statement]:
        """A statement; for `f(...)`, `x = f(...)` and `return f(...)` of a helper its statements, and what is left."""
        start = next((i + 1 for i, token in enumerate(tokens) if token in {"=", "return"}), 0)
        name, opening = "".join(tokens[start : start + 1]), start + 1
        is_call = name in self.helpers and self._lookup(name) == name and tokens[opening : opening + 1] == ["("]
        if not is_call or closing_bracket(tokens, opening) != len(tokens) - 1:
            return self._plain(tokens)
        arguments = tokens[opening + 1 : -1]
        inlined, result = self._inlined(name, split_arguments(arguments) if arguments else [])
        if start and not result:
            raise UnknownForm(f"'{name}' gives nothing")
        return [*inlined, *self._plain([*tokens[:start], result])] if start else inlined

    def _plain(self, tokens: list[str]) -> list[Statement]:
        return self._declarations(tokens) or [Simple(self._renamed(tokens))]

    def _inlined(self, name: str, arguments: list[list[str]]) -> tuple[list[Statement], str]:
        """Statements in place of a call, and the variable that then holds its result, or an empty name."""
        helper = self.helpers[name]
        if len(arguments) != len(helper.parameters):
            raise UnknownForm(f"'{name}' with {len(arguments)} arguments")
        bindings: dict[str, str] = {}
        found: list[Statement] = []
        for parameter, argument in zip(helper.parameters, arguments, strict=True):
            given = self._renamed(argument)
            if parameter.is_reference:
                bindings[parameter.name] = self._referred(parameter, given)
                continue
            unique = self._unique(parameter.name, parameter.kind)
            bindings[parameter.name] = unique
            found.append(Declaration(parameter.kind, unique, [], given))
        others = {other: helper for other, helper in self.helpers.items() if other != name}
        foreign = self.foreign | self.kinds.keys()
        inner = _Parser(_texts(helper.body[1:-1]), self.taken, self.kinds, others, foreign, scopes=[bindings, {}])
        found += inner.statements(len(inner.tokens))
        last = found.pop() if found and _is_return(found[-1]) else None
        if any(_is_return(leaf) for statement in found for leaf in leaves(statement)):
            raise UnknownForm(f"'{name}' returns early")
        if not isinstance(last, Simple) or last.tokens == ["return"]:
            return found, ""
        result = self._unique(f"msl_returned_by_{name}", helper.result)
        return [*found, Declaration(helper.result, result, [], last.tokens[1:])], result

    def _referred(self, parameter: HelperParameter, given: list[str]) -> str:
        """The variable that a reference is another name of."""
        same = len(given) == 1 and plain_type_tokens(self.kinds.get(given[0], [])) == plain_type_tokens(parameter.kind)
        if not same:
            raise UnknownForm(f"a reference '{parameter.name}' to '{' '.join(given)}'")
        return given[0]

    def _braces(self) -> list[Statement]:
        end = closing_bracket(self.tokens, self.position)
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
        end = closing_bracket(self.tokens, self.position)
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
        end = closing_bracket(self.tokens, self.position + 1)
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
            index = closing_bracket(self.tokens, index) + 1 if self.tokens[index] in {"(", "[", "{"} else index + 1
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
        found = next((scope[name] for scope in reversed(self.scopes) if name in scope), "")
        if not found and name in self.foreign:
            raise UnknownForm(f"'{name}' means something else inside a function")
        return found or name

    def _declare(self, name: str, kind: list[str]) -> str:
        self.scopes[-1][name] = unique = self._unique(name, kind)
        return unique

    def _unique(self, name: str, kind: list[str]) -> str:
        unique, number = name, 2
        while unique in self.taken:
            unique, number = f"{name}_{number}", number + 1
        self.taken.add(unique)
        self.kinds[unique] = kind
        return unique

    def _declarations(self, tokens: Sequence[str]) -> list[Statement]:
        """Declarations in a statement, one for each declarator; none when it is something else."""
        at = _name_position(tokens)
        if at is None:
            return []
        kind = self._renamed(tokens[:at])
        parts = split_arguments(tokens[at:])
        if any(not part or not is_name(part[0]) for part in parts):
            raise UnknownForm("a declaration with commas in template arguments")
        if len(parts) > 1 and ("*" in kind or "&" in kind):
            raise UnknownForm("several pointers in one declaration")
        return [self._declarator(kind, part) for part in parts]

    def _declarator(self, kind: list[str], part: Sequence[str]) -> Declaration:
        index = 1
        while index < len(part) and part[index] == "[":
            index = closing_bracket(part, index) + 1
        suffix = self._renamed(part[1:index])
        rest = part[index:]
        if not rest:
            return Declaration(kind, self._declare(part[0], [*kind, *suffix]), suffix, None)
        is_list = rest[0] in "({" or rest[1] == "{"
        initializer = self._renamed(rest[1:] if rest[0] == "=" else rest)
        return Declaration(kind, self._declare(part[0], [*kind, *suffix]), suffix, initializer, is_list)


def _is_return(statement: Statement) -> bool:
    return isinstance(statement, Simple) and statement.tokens[0] == "return"


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


def _name_position(tokens: Sequence[str]) -> int | None:
    """Index of the declared name when the tokens begin with a type and a name."""
    index = 0
    while index < len(tokens) and tokens[index] in QUALIFIERS:
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
            index = after_template_arguments(tokens, index)
    while index < len(tokens) and tokens[index] in {"*", "&", *QUALIFIERS}:
        index += 1
    if index >= len(tokens) or not is_name(tokens[index]) or index == 0:
        return None
    follows = tokens[index + 1] if index + 1 < len(tokens) else ";"
    return index if follows in {"=", ";", "[", ",", "(", "{"} else None
