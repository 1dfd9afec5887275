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

from software_gpu.msl_parser import ADDRESS_SPACES, SourceText, Token
from software_gpu.source import preprocess
from software_gpu.source_text import RefusedSource
from software_gpu.toolchain import find_toolchain
from software_gpu.translation import PROLOGUE, translate

__all__ = ["find_problems", "lint"]

# Clang can't copy a struct out of another address space in C++, where Metal can.
_FALSE_ALARM = re.compile(r"no matching (constructor|conversion)|candidate|no viable constructor")
_ERROR = re.compile(r"program_source:(\d+):\d+: error: (.*)")


def find_problems(source: str, macros: Mapping[str, str] | None = None) -> list[str]:
    """Problems of a source, each with its line; empty when there are none.

    Raises:
        KernelCompileError: The source does not even read as C++ with kernels.
    """
    try:
        parsed = preprocess(source, macros or {})
    except RefusedSource as error:
        return [error.problem]
    return [*lint(parsed), *_address_space_problems(parsed)]


def _address_space_problems(parsed: SourceText) -> Iterator[str]:
    text = PROLOGUE + translate(parsed, address_spaces=True)
    for line in find_toolchain().check_syntax(text, ["-DMSL_ADDRESS_SPACES"]).splitlines():
        found = _ERROR.search(line)
        if found and not _FALSE_ALARM.search(found[2]):
            yield f"line {found[1]}: {found[2]}"


def lint(parsed: SourceText) -> Iterator[str]:
    """Problems that the tokens show; quick enough to look for them in every compilation."""
    yield from _parameter_problems(parsed)
    yield from _recursion_problems(parsed)


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
