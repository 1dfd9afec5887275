"""Prints scalar expressions as C++. What Metal and CUDA have in common is here; a dialect lists its exceptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from npu_compiler.dtypes import BOOL, INT64, DType
from npu_compiler.expr import FUNCTIONS, Call, Checked, Const, Expr, Iota, Load, children

__all__ = ["CHECK", "Dialect", "LeafNames", "Printer"]

CHECK = "checked_index"
"""The function of each target's own that checks an index, for `expr.Checked`."""


@dataclass(frozen=True)
class Dialect:
    """A kernel language.

    Attributes:
        storage: Name of each data type in device memory.
        functions: Texts that differ from those of `FUNCTIONS`.
        infinity, nan: Literals.
        pointer: Type of a read-only device pointer, with ``{type}``.
        faults: Type of the pointer to the record of faults.
    """

    storage: Mapping[str, str]
    pointer: str
    faults: str
    functions: Mapping[str, str] = field(default_factory=dict)
    infinity: str = "INFINITY"
    nan: str = "NAN"

    def pointer_to(self, dtype: DType | None) -> str:
        """Type of a pointer that an expression reads through; without a data type, to the record of faults."""
        return self.faults if dtype is None else self.pointer.format(type=self.storage[dtype.name])

    def register(self, dtype: DType) -> str:
        """Type of a value in a register: all floating point is float32, small integers are int."""
        if dtype.is_float:
            return "float"
        return "bool" if dtype == BOOL else self.storage["int64"] if dtype == INT64 else "int"

    def literal(self, value: float | int | bool, dtype: DType) -> str:
        """A number as a constant of the register type of `dtype`."""
        if dtype.is_float:
            number = float(value)
            if math.isnan(number):
                return self.nan
            if math.isinf(number) or abs(number) > 3.4028235677973366e38:
                return self.infinity if number > 0 else f"(-{self.infinity})"
            text = repr(number)
            return f"{text}f" if number >= 0 else f"({text}f)"
        if dtype == BOOL:
            return "true" if value else "false"
        return f"{self.register(dtype)}({int(value)})"

    def call(self, fn: str, args: list[str], dtype: DType) -> str:
        """A function call on operands that are already text."""
        if fn == "cast":
            text = f"({args[0]} != 0)" if dtype == BOOL else f"{self.register(dtype)}({args[0]})"
        else:
            text = self.functions.get(fn, FUNCTIONS[fn].text).format(*args)
        if dtype.is_integer and dtype.size < 4:  # a register is wider than the type, which wraps around
            return f"{self.register(dtype)}({self.storage[dtype.name]}({text}))"
        return text


@dataclass(frozen=True)
class LeafNames:
    """How a kernel spells the leaves of its expressions: the address of each load, and the value of each position.

    Attributes:
        loads: By identity of the load: pointer name, address text, and whether it may name elements that do not exist.
        iotas: By identity of the iota: its text.
        anchors: By tensor: the name of the anchor's result. Where the epilogue combines two columns, the odd one's name
            has a 1 after it.
        checks: By identity of the checked index: what its function is told after the index, and whether it may name
            indices that do not exist.
    """

    loads: Mapping[int, tuple[str, str, bool]]
    iotas: Mapping[int, str]
    anchors: Mapping[int, str]
    checks: Mapping[int, tuple[str, bool]] = field(default_factory=dict)


class Printer:
    """Emits statements that compute expressions; equal sub-expressions are computed once."""

    def __init__(self, dialect: Dialect, names: LeafNames, indent: str = "    ") -> None:
        self.dialect, self.names, self.indent = dialect, names, indent
        self.lines: list[str] = []
        self._known: dict[int, str] = {}
        self._by_text: dict[str, str] = {}
        self._count = 0

    def define(self, expr: Expr, name: str) -> None:
        """Says that `expr` already has a name, such as a finished reduction."""
        self._known[id(expr)] = name

    def scope(self, indent: str) -> Printer:
        """A printer for a nested block: it knows what is known here, and what it learns stays there."""
        inner = Printer(self.dialect, self.names, indent)
        inner._known, inner._by_text, inner._count = dict(self._known), dict(self._by_text), self._count
        return inner

    def value(self, expr: Expr) -> str:
        """Text for `expr`: a literal or a variable, whose definition is appended to `lines`."""
        known = self._known.get(id(expr))
        if known is not None:
            return known
        if isinstance(expr, Const):
            return self.dialect.literal(expr.value, expr.dtype)
        if isinstance(expr, Call) and expr.fn == "where" and any(self._is_guarded(arg) for arg in expr.args[1:]):
            condition = self.value(expr.args[0])
            text = f"({condition} ? {self.inline(expr.args[1])} : {self.inline(expr.args[2])})"
        else:
            text = self._text(expr, [self.value(child) for child in children(expr)])
        name = self._by_text.get(text)
        if name is None:
            name = f"v{self._count}"
            self._count += 1
            self.lines.append(f"{self.indent}{self.dialect.register(expr.dtype)} {name} = {text};")
            self._by_text[text] = name
        self._known[id(expr)] = name
        return name

    def inline(self, expr: Expr) -> str:
        """Text that evaluates `expr` in place, so that a side that is not taken reads no memory."""
        known = self._known.get(id(expr))
        if known is not None:
            return known
        if isinstance(expr, Const):
            return self.dialect.literal(expr.value, expr.dtype)
        return self._text(expr, [self.inline(child) for child in children(expr)])

    def _text(self, expr: Expr, args: list[str]) -> str:
        if isinstance(expr, Call):
            return self.dialect.call(expr.fn, args, expr.dtype)
        if isinstance(expr, Iota):
            return f"{self.dialect.register(expr.dtype)}({self.names.iotas[id(expr)]})"
        if isinstance(expr, Load):
            if expr.ref.tensor in self.names.anchors:
                return self.names.anchors[expr.ref.tensor] + ("1" if expr.ref.view.offset else "")
            pointer, address, _ = self.names.loads[id(expr)]
            if args:
                address = f"{address} + int({args[0]}) * {self._stride(expr)}"
            return f"{self.dialect.register(expr.dtype)}({pointer}[{address}])"
        if isinstance(expr, Checked):
            index, element = args
            rest, _ = self.names.checks[id(expr)]
            return f"{CHECK}({index}, {expr.extent}, {expr.otherwise}, int({element}), {rest})"
        raise TypeError(f"{type(expr).__name__} has no text of its own")

    def _stride(self, load: Load) -> str:
        return str(load.index_stride)

    def _is_guarded(self, expr: Expr) -> bool:
        if isinstance(expr, Load) and self.names.loads.get(id(expr), ("", "", False))[2]:
            return True
        if isinstance(expr, Checked) and self.names.checks[id(expr)][1]:
            return True
        return id(expr) not in self._known and any(self._is_guarded(child) for child in children(expr))
