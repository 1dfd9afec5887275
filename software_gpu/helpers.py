"""Functions that synchronise threads, as what stands in place of a call of one.

A region ends at each barrier, so a function with one inside has no region form of its own: its statements become those
of the kernel, with a variable for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from software_gpu.msl_parser import ADDRESS_SPACES, Function, Token, is_name

__all__ = ["QUALIFIERS", "Helper", "HelperParameter", "helpers_of", "plain_type_tokens"]

QUALIFIERS = ADDRESS_SPACES | {"const", "constexpr", "volatile", "static"}
_LINKAGE = frozenset({"METAL_FUNC", "inline", "static"})


@dataclass(frozen=True)
class HelperParameter:
    """`kind name`: a variable of its own, or with an ampersand another name of what is given."""

    kind: list[str]
    name: str

    @property
    def is_reference(self) -> bool:
        return "&" in self.kind


@dataclass(frozen=True)
class Helper:
    """A function whose statements may stand in place of its calls."""

    result: list[str]
    parameters: list[HelperParameter]
    body: tuple[Token, ...]


def helpers_of(functions: Mapping[str, Sequence[Function]], names: Collection[str]) -> dict[str, Helper]:
    """Those of the named functions that are plain: no templates, overloads or methods, no arrays for parameters."""
    found = {}
    for name in names & functions.keys():
        helper = _helper(functions[name][0]) if len(functions[name]) == 1 else None
        if helper:
            found[name] = helper
    return found


def _helper(function: Function) -> Helper | None:
    result = [token.text for token in function.head if token.text not in _LINKAGE]
    if function.depth or not result or not all(map(is_name, result)) or {"template", "kernel"} & {*result}:
        return None
    parameters = []
    for part in function.parameters:
        *kind, name = (token.text for token in part)
        known = all(is_name(token) or token in {"*", "&"} for token in kind) and kind[-1:] != ["&&"]
        # What is stored through a pointer to a thread's own variable would not be seen as a change of it.
        if not kind or not known or not is_name(name) or {"*", "thread"} <= {*kind}:
            return None
        parameters.append(HelperParameter(kind, name))
    return Helper(result, parameters, function.body)


def plain_type_tokens(kind: Sequence[str]) -> list[str]:
    """A type without what says where and how it is kept."""
    return [token for token in kind if token not in QUALIFIERS | {"&"}]
