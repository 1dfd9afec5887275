"""From MSL text to C++ text: attributes out, threadgroup variables placed, vector constructors renamed.

Everything else that differs between the two languages is in the headers. Line numbers stay as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from npu_compiler.errors import KernelCompileError
from software_gpu.language import pointer_edits
from software_gpu.msl_parser import Kernel, SourceText, Token, split_at_commas

__all__ = [
    "FIBER_PROLOGUE",
    "HEADERS",
    "PROLOGUE",
    "RED_ZONE",
    "REGION_PROLOGUE",
    "ThreadgroupVariable",
    "place_variables",
    "synchronizes",
    "synchronizing_functions",
    "threadgroup_variables",
    "translate",
]

RED_ZONE = 32  # bytes between the threadgroup variables of a checked kernel; a multiple of 16, their alignment
HEADERS = '#include "msl.h"\n'
_FIRST_LINE = '#line 1 "program_source"\n'
_RUNS_ON_FIBERS = "namespace msl {{ MSL_INLINE bool runs_on_fibers() {{ return {}; }} }}\n".format
PROLOGUE = HEADERS + _RUNS_ON_FIBERS("true") + _FIRST_LINE
REGION_PROLOGUE = HEADERS + _RUNS_ON_FIBERS("false") + _FIRST_LINE
# Where lanes are to become vectors, or accesses to be looked at, every function must stand in the kernel itself. Fibers
# call it as any program does: functions that call each other several times would grow with each level.
FIBER_PROLOGUE = f"{HEADERS}{_RUNS_ON_FIBERS('true')}#undef METAL_FUNC\n#define METAL_FUNC inline\n{_FIRST_LINE}"
_SYNCHRONIZING = re.compile(r"(threadgroup_barrier|simdgroup_\w+|simd_\w+|quad_\w+|make_filled_simdgroup_matrix)\Z")


@dataclass(frozen=True)
class ThreadgroupVariable:
    """`threadgroup T name[N];` in a kernel: element type, array suffix, and the tokens it was declared by."""

    name: str
    type: str
    suffix: str


def threadgroup_variables(body: Sequence[Token]) -> Iterator[tuple[int, int, list[ThreadgroupVariable]]]:
    """Threadgroup declarations of a kernel's body: first token, semicolon, variables.

    Raises:
        KernelCompileError: One has an initialiser or is not in the outermost scope; Metal refuses both.
    """
    depth = 0
    for index, token in enumerate(body):
        depth += (token.text == "{") - (token.text == "}")
        if token.text != "threadgroup" or body[index - 1].text not in {"{", "}", ";"}:
            continue
        end = next(i for i in range(index, len(body)) if body[i].text == ";")
        declaration = body[index + 1 : end]
        if any(part.text in "*&" for part in declaration[: _first_bracket(declaration)]):
            continue
        if depth != 1:
            raise KernelCompileError(
                f"line {token.line}: a threadgroup variable must be declared in the outermost scope of a kernel"
            )
        if any(part.text in {"=", "{"} for part in declaration):
            raise KernelCompileError(f"line {token.line}: a threadgroup variable can't have an initialiser")
        yield index, end, list(_declarators(declaration))


def _first_bracket(tokens: Sequence[Token]) -> int:
    return next((i for i, token in enumerate(tokens) if token.text in "[="), len(tokens))


def _declarators(declaration: Sequence[Token]) -> Iterator[ThreadgroupVariable]:
    first, *others = split_at_commas(declaration)
    bracket = _first_bracket(first)
    kind = " ".join(token.text for token in first[: bracket - 1])
    for part in ([first[bracket - 1], *first[bracket:]], *others):
        yield ThreadgroupVariable(part[0].text, kind, " ".join(token.text for token in part[1:]))


def place_variables(variables: Sequence[ThreadgroupVariable], previous_end: str) -> tuple[str, str]:
    """C++ declarations that place the variables one after the other; and the name of the constant where they end."""
    parts = []
    for variable in variables:
        kind, end = f"msl_type_{variable.name}", f"msl_end_{variable.name}"
        parts.append(
            f"typedef {variable.type} {kind}{variable.suffix}; "
            f"constexpr uint {end} = ::msl::end_of<{kind}>({previous_end}); "
            f"{kind}& {variable.name} = *({kind}*)(msl_threadgroup + {end} - sizeof({kind})); "
            f"::msl::placed({end} - sizeof({kind}), {end});"
        )
        previous_end = end
    return " ".join(parts), previous_end


def synchronizes(name: str) -> bool:
    """Whether a function of Metal by this name synchronises threads."""
    return _SYNCHRONIZING.match(name) is not None


def synchronizing_functions(source: SourceText) -> set[str]:
    """Functions that synchronise threads, themselves or through others they call."""
    bodies = {
        name: {token.text for function in functions for token in function.body}
        for name, functions in source.functions().items()
    }
    found = {name for name, texts in bodies.items() if any(_SYNCHRONIZING.match(text) for text in texts)}
    while True:
        more = {name for name, texts in bodies.items() if name not in found and texts & found}
        if not more:
            return found
        found |= more


@dataclass(frozen=True)
class _Edit:
    start: int
    end: int
    replacement: str


def translate(source: SourceText, *, address_spaces: bool = False) -> str:
    """The source as C++, kernels as inline functions of the same name.

    Args:
        address_spaces: Keep threadgroup variables as declarations, for the pass that only checks address spaces.
    """
    edits = list(_attribute_edits(source))
    edits += _vector_constructor_edits(source.tokens)
    if not address_spaces:
        edits += [_Edit(place, place, text) for place, text in pointer_edits(source.tokens)]
    for number, kernel in enumerate(source.kernels):
        if address_spaces:
            edits += _static_variable_edits(kernel)
        else:
            edits += _placement_edits(kernel, number)
    return _apply(source.text, edits)


def _attribute_edits(source: SourceText) -> Iterator[_Edit]:
    for attribute in source.attributes:
        yield _Edit(source.tokens[attribute.first].start, source.tokens[attribute.last].end, "")


def _vector_constructor_edits(tokens: Sequence[Token]) -> Iterator[_Edit]:
    """`vec<T, 4>(...)` is a constructor, and clang's vectors have none: call the function that stands for it."""
    for index in range(len(tokens) - 1):
        if tokens[index].text != "vec" or tokens[index + 1].text != "<":
            continue
        depth = 0
        for last in range(index + 1, len(tokens)):
            depth += (tokens[last].text == "<") - (tokens[last].text == ">")
            if depth == 0 or tokens[last].text in {";", "{", "}"}:
                break
        if depth == 0 and tokens[last + 1].text == "(" and tokens[last + 2].text != ")":
            yield _Edit(tokens[index].start, tokens[index].end, "::msl::make")


def _placement_edits(kernel: Kernel, number: int) -> list[_Edit]:
    edits = []
    end = "0"
    for first, last, variables in threadgroup_variables(kernel.body):
        text, new_end = place_variables(variables, end)
        if end == "0":
            text = f"unsigned char* const msl_threadgroup = ::msl::threadgroup_memory(0); {text}"
        edits.append(_Edit(kernel.body[first].start, kernel.body[last].end, text))
        end = new_end
    if edits:
        final = edits[-1]
        record = f" (void)&::msl::threadgroup_length<{number}, {end}>::record;"
        edits[-1] = _Edit(final.start, final.end, final.replacement + record)
    return edits


def _static_variable_edits(kernel: Kernel) -> Iterator[_Edit]:
    for first, _, _ in threadgroup_variables(kernel.body):
        yield _Edit(kernel.body[first].start, kernel.body[first].start, "static ")


def _apply(text: str, edits: list[_Edit]) -> str:
    parts = []
    position = 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        newlines = text.count("\n", edit.start, edit.end)
        parts += [text[position : edit.start], edit.replacement, "\n" * newlines]
        position = edit.end
    return "".join([*parts, text[position:]])
