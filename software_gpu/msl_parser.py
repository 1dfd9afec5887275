"""Reads Metal Shading Language source: tokens, kernels and their parameters. Clang does the rest.

The source is already preprocessed and compiles as C++ once attributes are taken out, so no full grammar is needed:
kernels are found by their keyword, parameters by commas, attributes by their double brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from npu_compiler.errors import KernelCompileError

__all__ = [
    "ADDRESS_SPACES",
    "BUILTINS",
    "Function",
    "Kernel",
    "Parameter",
    "SourceText",
    "Token",
    "is_name",
    "matching",
    "split_at_commas",
    "tokenize",
]

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<directive>^[ \t]*\#[^\n]*)
      | (?P<text>"(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'
          | [A-Za-z_]\w*
          | (?:\d|\.\d)(?:[eE][+-]|[\w.])*
          | ::|->|\+\+|--|<<=|>>=|<<|[-+*/%&|^<>=!]=|&&|\|\||.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_LINE_MARKER = re.compile(r"\s*#\s*(?:line\s+)?(\d+)")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_CLOSING = {"(": ")", "[": "]", "{": "}"}

ADDRESS_SPACES = frozenset({"device", "constant", "threadgroup", "thread"})

# Parameters that the GPU fills in, by attribute.
BUILTINS = frozenset(
    {
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "thread_index_in_quadgroup",
        "quadgroup_index_in_threadgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threads_per_simdgroup",
        "thread_execution_width",
    }
)


@dataclass(frozen=True)
class Token:
    """One token: its text, its place in the source, the line an author would look at."""

    text: str
    start: int
    end: int
    line: int


def is_name(text: str) -> bool:
    """Whether a token is an identifier or a keyword."""
    return _NAME.match(text) is not None


def tokenize(source: str) -> list[Token]:
    """Tokens without white space, comments and preprocessor lines; line markers set the lines."""
    tokens: list[Token] = []
    line = 1
    for found in _TOKEN.finditer(source):
        if found["directive"]:
            marker = _LINE_MARKER.match(found["directive"])
            if marker:
                line = int(marker[1]) - 1
        elif found["text"]:
            tokens.append(Token(found["text"], found.start(), found.end(), line))
        line += found[0].count("\n")
    return tokens


def matching(tokens: Sequence[Token], opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    opener, closer = tokens[opening].text, _CLOSING[tokens[opening].text]
    depth = 0
    for index in range(opening, len(tokens)):
        depth += (tokens[index].text == opener) - (tokens[index].text == closer)
        if depth == 0:
            return index
    raise KernelCompileError(f"line {tokens[opening].line}: '{opener}' is never closed")


def split_at_commas(tokens: Sequence[Token]) -> list[list[Token]]:
    """The parts between commas that stand in no bracket (angle brackets of template arguments included)."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in "([{<") - (token.text in ")]}>")
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


@dataclass(frozen=True)
class Attribute:
    """`[[name(argument)]]`, by the indices of its first and last token."""

    name: str
    argument: str
    first: int
    last: int


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter.

    Attributes:
        name: As the kernel calls it.
        type: Its C++ type, address space included: ``device const half*``.
        role: ``buffer``, ``threadgroup`` or one of BUILTINS.
        index: The argument index of a buffer or of threadgroup memory; 0 for the others.
        space: The address space it points to, or ``""``.
    """

    name: str
    type: str
    role: str
    index: int
    space: str
    line: int

    @property
    def is_reference(self) -> bool:
        return self.type.endswith("&")


@dataclass(frozen=True)
class Kernel:
    """A kernel: its parameters and the tokens of its body, braces included."""

    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[Token, ...]
    line: int

    @property
    def buffers(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.role == "buffer"]


@dataclass(frozen=True)
class Function:
    """A function: the tokens ahead of its name, of each parameter, and of its body, braces included.

    Attributes:
        depth: How many braces stand around it; a method of a struct has one.
    """

    name: str
    head: tuple[Token, ...]
    parameters: tuple[tuple[Token, ...], ...]
    body: tuple[Token, ...]
    depth: int

    def changed_arguments(self) -> set[int]:
        """Positions of arguments that a call may change: references and pointers to what is not constant."""
        found = set()
        for position, parameter in enumerate(self.parameters):
            texts = {token.text for token in parameter}
            to_thread = "thread" in texts and {"*", "["} & texts
            if not {"const", "constant"} & texts and ("&" in texts or to_thread):
                found.add(position)
        return found


@dataclass
class SourceText:
    """A preprocessed source with its tokens, attributes and kernels."""

    text: str
    tokens: list[Token]
    attributes: list[Attribute] = field(init=False)
    kernels: list[Kernel] = field(init=False)
    _functions: dict[str, list[Function]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.attributes = list(_find_attributes(self.tokens))
        self.kernels = [self._kernel_at(i) for i, token in enumerate(self.tokens) if token.text == "kernel"]
        names = [kernel.name for kernel in self.kernels]
        for kernel in self.kernels:
            if names.count(kernel.name) > 1:
                raise KernelCompileError(f"line {kernel.line}: kernel '{kernel.name}' is defined twice")

    def functions(self) -> dict[str, list[Function]]:
        """All functions with a body, by name."""
        if self._functions is None:
            self._functions = self._found_functions()
        return self._functions

    def _found_functions(self) -> dict[str, list[Function]]:
        found: dict[str, list[Function]] = {}
        depth = ended = 0  # and where what stands ahead has ended
        for index in range(len(self.tokens) - 1):
            name, bracket = self.tokens[index].text, self.tokens[index + 1].text
            depth += (name == "{") - (name == "}")
            ended = index + 1 if name in {";", "{", "}"} else ended
            if bracket != "(" or not is_name(name) or name in {"if", "for", "while", "switch"}:
                continue
            closing = matching(self.tokens, index + 1)
            after = closing + 1
            while after < len(self.tokens) and self.tokens[after].text in ADDRESS_SPACES | {"const"}:
                after += 1
            if after < len(self.tokens) and self.tokens[after].text == "{":
                parameters = split_at_commas(self.tokens[index + 2 : closing])
                body = tuple(self.tokens[after : matching(self.tokens, after) + 1])
                head = tuple(self.tokens[ended:index])
                found.setdefault(name, []).append(Function(name, head, tuple(map(tuple, parameters)), body, depth))
        return found

    def called_by(self, kernel: Kernel) -> list[Function]:
        """The functions that a kernel calls, or that are called by such."""
        functions = self.functions()
        pending, reached = {token.text for token in kernel.body} & functions.keys(), set[str]()
        while pending:
            reached |= pending
            texts = {token.text for name in pending for function in functions[name] for token in function.body}
            pending = texts & functions.keys() - reached
        return [function for name in sorted(reached) for function in functions[name]]

    def _kernel_at(self, index: int) -> Kernel:
        tokens = self._without_attributes(index, len(self.tokens))
        opening = next((i for i, token in enumerate(tokens) if token.text == "("), -1)
        if opening < 2 or tokens[1].text != "void":
            raise KernelCompileError(f"line {self.tokens[index].line}: 'kernel' must be followed by 'void name(...)'")
        name = tokens[opening - 1]
        first = self.tokens.index(tokens[opening], index)
        last = matching(self.tokens, first)
        if last + 1 >= len(self.tokens) or self.tokens[last + 1].text != "{":
            raise KernelCompileError(f"line {name.line}: kernel '{name.text}' has no body")
        parameters = tuple(self._parameter(part, name.text) for part in split_at_commas(self.tokens[first + 1 : last]))
        body = tuple(self.tokens[last + 1 : matching(self.tokens, last + 1) + 1])
        return Kernel(name.text, parameters, body, name.line)

    def _without_attributes(self, first: int, last: int) -> list[Token]:
        covered = {i for attribute in self.attributes for i in range(attribute.first, attribute.last + 1)}
        return [self.tokens[i] for i in range(first, last) if i not in covered]

    def _parameter(self, part: Sequence[Token], kernel: str) -> Parameter:
        own = list(_find_attributes(part))
        covered = {i for attribute in own for i in range(attribute.first, attribute.last + 1)}
        plain = [token.text for i, token in enumerate(part) if i not in covered]
        name, kind = plain[-1], _join(plain[:-1])
        space = next((text for text in plain if text in ADDRESS_SPACES), "")
        where = f"line {part[0].line}: kernel '{kernel}', parameter '{name}'"
        if len(own) != 1:
            raise KernelCompileError(f"{where}: expected one attribute, such as [[buffer(0)]], and found {len(own)}")
        role = own[0].name
        if role in BUILTINS:
            return Parameter(name, kind, role, 0, space, part[0].line)
        if role not in {"buffer", "threadgroup"} or not own[0].argument.isdigit():
            raise KernelCompileError(f"{where}: the attribute [[{role}]] is not offered by the software GPU")
        return Parameter(name, kind, role, int(own[0].argument), space, part[0].line)


def _join(texts: Sequence[str]) -> str:
    return re.sub(r" (?=[*&:<>,])|(?<=[:<]) ", "", " ".join(texts))


def _find_attributes(tokens: Sequence[Token]) -> Iterator[Attribute]:
    index = 0
    while index + 1 < len(tokens):
        here, following = tokens[index], tokens[index + 1]
        if here.text != "[" or following.text != "[" or following.start != here.end:
            index += 1
            continue
        last = matching(tokens, index)
        has_argument = tokens[index + 3].text == "("
        argument = "".join(token.text for token in tokens[index + 4 : last - 2]) if has_argument else ""
        yield Attribute(tokens[index + 2].text, argument, index, last)
        index = last + 1
