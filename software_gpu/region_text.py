"""Statements as C++ text, in the lines of a function that is being written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from software_gpu.constants import own_trips
from software_gpu.region_storage import UNROLLED_TRIPS, head_tokens
from software_gpu.statements import Block, Declaration, For, If, Simple, Statement, UnknownForm, While, tokens_of
from software_gpu.variables import BARRIERS, COLLECTIVES, Variables

__all__ = ["CodeText", "assignment_text", "declaration_text", "plain_type"]

_INDENT = "  "
# The product of two matrices is unrolled already; more of it would only be slower to compile. A loop around loops over
# lanes is clang's to judge: its arrays are in memory anyway, and unrolled it would be that many loops to vectorise.
_MATRIX_LOOP, _SHORT_LOOP = '_Pragma("nounroll") ', '_Pragma("unroll") '


@dataclass
class CodeText:
    """Lines of C++ and how deep they are nested.

    Attributes:
        masks: Which lanes take part in what is being written: names of arrays, or conditions after a question mark.
    """

    variables: Variables
    integers: Mapping[str, int]
    lines: list[str] = field(default_factory=list, kw_only=True)
    depth: int = field(default=2, kw_only=True)
    masks: list[str] = field(default_factory=list, kw_only=True)

    def statement(self, statement: Statement, *, stored: bool = False) -> None:
        """Writes a statement without barriers and simdgroup functions, for which there are pieces."""
        _check_alone(tokens_of(statement))
        match statement:
            case Simple(tokens):
                self.line(self._simple(tokens) + ";")
            case Declaration():
                self.line((assignment_text(statement) if stored else declaration_text(statement)) + ";")
            case Block(body):
                self.open(statement, unrolls=True)
                for inner in body:
                    self.statement(inner)
                self.close()
            case If(_, then, otherwise):
                self.open(statement, unrolls=True)
                for inner in then:
                    self.statement(inner)
                if otherwise:
                    self.reopen_else()
                    for inner in otherwise:
                        self.statement(inner)
                self.close()
            case For(_, _, _, body) | While(_, body):
                self.open(statement, unrolls=True)
                for inner in body:
                    self.statement(inner)
                self.close()

    def _simple(self, tokens: Sequence[str]) -> str:
        if list(tokens) == ["return"] and self.masks[:1] == ["msl_live_here"]:
            return "{ msl_live_here[msl_l] = false; return; }"
        return " ".join(tokens)

    def open(self, head: Block | If | For | While, *, unrolls: bool = False) -> None:
        """Writes the head of a statement; `unrolls` if none of its body is a loop over lanes."""
        _check_alone(head_tokens(head))
        match head:
            case Block():
                text = "{"
            case If(condition):
                text = f"if ({' '.join(condition)}) {{"
            case While(condition):
                text = f"while ({' '.join(condition)}) {{"
            case For(init, condition, step):
                short = unrolls and own_trips(head, self.integers) <= UNROLLED_TRIPS
                pragma = _MATRIX_LOOP if self.variables.has_matrix(tokens_of(head)) else _SHORT_LOOP if short else ""
                start = "" if init is None else _statement_text(init)
                text = f"{pragma}for ({start}; {' '.join(condition)}; {' '.join(step)}) {{"
        self.line(text)
        self.depth += 1

    def reopen_else(self) -> None:
        self.depth -= 1
        self.line("} else {")
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.line("}")

    def line(self, text: str) -> None:
        self.lines.append(_INDENT * self.depth + text)


def _check_alone(tokens: Sequence[str]) -> None:
    """Whatever synchronises threads waits for fibers, of which the region form has none."""
    for token in tokens:
        if token in COLLECTIVES or token in BARRIERS:
            raise UnknownForm(f"{token} in a place that has no form")


def plain_type(declaration: Declaration) -> str:
    """The type of a variable that is declared in one place and assigned in another."""
    kept = list(declaration.type)
    if "*" not in kept:
        kept = [token for token in kept if token not in {"const", "constexpr"}]
    elif kept[-1] == "const":
        kept.pop()
    return " ".join(kept)


def declaration_text(declaration: Declaration) -> str:
    text = " ".join([*declaration.type, declaration.name, *declaration.suffix])
    if declaration.initializer is None:
        return text
    joined = " ".join(declaration.initializer)
    return f"{text} {joined}" if declaration.initializer[0] == "(" and declaration.is_list else f"{text} = {joined}"


def assignment_text(declaration: Declaration) -> str:
    """The initialisation of a variable that is stored elsewhere."""
    if declaration.initializer is None:
        return ""
    joined = " ".join(declaration.initializer)
    if not declaration.is_list:
        return f"{declaration.name} = {joined}"
    if declaration.suffix:
        start = f"msl_start_{declaration.name}"
        return f"{{ const msl_type_{declaration.name} {start} = {joined}; msl::fill({declaration.name}, {start}); }}"
    return f"{declaration.name} = msl_type_{declaration.name} {joined}"


def _statement_text(statement: Statement) -> str:
    match statement:
        case Simple(tokens):
            return " ".join(tokens)
        case Declaration():
            return declaration_text(statement)
        case _:
            raise UnknownForm("a loop that begins with neither a declaration nor an expression")
