"""What Apple's compiler would refuse in a Metal source and clang alone would not.

    from software_gpu.checks import find_problems
    assert find_problems(source) == []

Two looks: one over the tokens, and one by clang with the address spaces as real address spaces, in which a pointer to
device memory does not become one to threadgroup memory. Races and accesses out of bounds show only in a run:
`software_gpu.metal.create_device(check=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from software_gpu.msl_parser import ADDRESS_SPACES, SourceText, Token, is_name
from software_gpu.source import preprocess
from software_gpu.toolchain import find_toolchain
from software_gpu.translation import PROLOGUE, translate

__all__ = ["find_problems", "lint"]

_FORBIDDEN = {
    "double": "MSL has no double",
    "new": "MSL has no dynamic memory",
    "delete": "MSL has no dynamic memory",
    "throw": "MSL has no exceptions",
    "try": "MSL has no exceptions",
    "goto": "MSL has no goto",
    "dynamic_cast": "MSL has no run-time types",
    "typeid": "MSL has no run-time types",
    "virtual": "MSL has no virtual functions",
    "thread_local": "MSL has no thread_local",
    "asm": "MSL has no inline assembly",
}
_NOT_VARIABLES = frozenset(
    {"typedef", "using", "struct", "enum", "union", "class", "template", "static_assert", "namespace"}
)
# Clang can't copy a struct out of another address space in C++, where Metal can.
_FALSE_ALARM = re.compile(r"no matching (constructor|conversion)|candidate|no viable constructor")
_ERROR = re.compile(r"program_source:(\d+):\d+: error: (.*)")


def find_problems(source: str, macros: Mapping[str, str] | None = None) -> list[str]:
    """Problems of a source, each with its line; empty when there are none.

    Raises:
        KernelCompileError: The source does not even read as C++ with kernels.
    """
    parsed = preprocess(source, macros or {})
    return [*lint(parsed), *_address_space_problems(parsed)]


def _address_space_problems(parsed: SourceText) -> Iterator[str]:
    text = PROLOGUE + translate(parsed, address_spaces=True)
    for line in find_toolchain().check_syntax(text, ["-DMSL_ADDRESS_SPACES"]).splitlines():
        found = _ERROR.search(line)
        if found and not _FALSE_ALARM.search(found[2]):
            yield f"line {found[1]}: {found[2]}"


def lint(parsed: SourceText) -> Iterator[str]:
    """Problems that the tokens show; quick enough to look for them in every compilation."""
    for token in parsed.tokens:
        if token.text in _FORBIDDEN:
            yield f"line {token.line}: '{token.text}': {_FORBIDDEN[token.text]}"
    yield from _parameter_problems(parsed)
    yield from _recursion_problems(parsed)
    yield from _program_scope_problems(parsed.tokens)


def _parameter_problems(parsed: SourceText) -> Iterator[str]:
    for kernel in parsed.kernels:
        taken: dict[tuple[str, int], str] = {}
        for parameter in kernel.parameters:
            where = f"line {parameter.line}: kernel '{kernel.name}', parameter '{parameter.name}'"
            points = "*" in parameter.type or parameter.is_reference
            if points and parameter.space not in ADDRESS_SPACES - {"thread"}:
                yield f"{where}: a pointer or reference must name device, constant or threadgroup"
            if parameter.role == "buffer" and (not points or parameter.space not in {"device", "constant"}):
                yield f"{where}: [[buffer]] needs a pointer or reference to device or constant memory"
            if parameter.role == "threadgroup" and parameter.space != "threadgroup":
                yield f"{where}: [[threadgroup]] needs a pointer to threadgroup memory"
            if parameter.role in {"buffer", "threadgroup"}:
                place = (parameter.role, parameter.index)
                if place in taken:
                    yield f"{where}: index {parameter.index} is taken by '{taken[place]}'"
                taken[place] = parameter.name


def _recursion_problems(parsed: SourceText) -> Iterator[str]:
    functions = parsed.functions()
    calls = {
        name: {called for function in overloads for called in _called(function.body)} & functions.keys()
        for name, overloads in functions.items()
    }
    for name in calls:
        reached, pending = set[str](), set(calls[name])
        while pending:
            callee = pending.pop()
            reached.add(callee)
            pending |= calls[callee] - reached
        # An overload that calls another one is no recursion.
        if name in reached and len(functions[name]) == 1:
            yield f"line {functions[name][0].body[0].line}: '{name}' calls itself; MSL has no recursion"


def _called(body: Sequence[Token]) -> Iterator[str]:
    """Names that are followed by arguments and belong to no object."""
    for before, token, after in zip(body, body[1:], body[2:], strict=False):
        if after.text in ("(", "<") and before.text not in (".", "->"):
            yield token.text


def _program_scope_problems(tokens: list[Token]) -> Iterator[str]:
    """Variables outside functions must be constant."""
    index = 0
    while index < len(tokens):
        end = _declaration_end(tokens, index)
        statement = [token.text for token in tokens[index:end]]
        ends_as_variable = end < len(tokens) and tokens[end].text == ";" and len(statement) > 1
        if ends_as_variable and "(" not in statement[: _first(statement, "=")] and not _NOT_VARIABLES & {*statement}:
            declares = is_name(statement[0]) and "constant" not in statement
            if declares:
                name = next((text for text in reversed(statement[: _first(statement, "=")]) if is_name(text)), "?")
                yield f"line {tokens[index].line}: '{name}': a variable outside a function must be 'constant'"
        index = end + 1


def _first(statement: list[str], text: str) -> int:
    return statement.index(text) if text in statement else len(statement)


def _declaration_end(tokens: list[Token], start: int) -> int:
    """Index of the semicolon or closing brace that ends the declaration at namespace scope."""
    depth = 0
    for index in range(start, len(tokens)):
        text = tokens[index].text
        depth += (text in "({[") - (text in ")}]")
        if depth == 0 and text == ";":
            return index
        if depth == 0 and text == "}" and tokens[index + 1 : index + 2] and tokens[index + 1].text != ";":
            return index
    return len(tokens)
