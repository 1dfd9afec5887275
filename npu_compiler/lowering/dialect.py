"""Prints scalar expressions as C++. What Metal and CUDA have in common is here; a dialect lists its exceptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from npu_compiler.dtypes import BOOL, INT64, DType
from npu_compiler.tensor.coded import encoded_number
from npu_compiler.tensor.expr import FUNCTIONS, Call, Checked, Const, Expr, Iota, Load, Reduce, children

__all__ = ["CHECK", "Dialect", "LeafNames", "Printer", "is_small"]

CHECK = "checked_index"
"""The function of each target's own that checks an index, for `expr.Checked`."""


@dataclass(frozen=True)
class Dialect:
    """A kernel language.

    Attributes:
        storage: Name of each data type in device memory.
        functions: Texts that differ from those of `FUNCTIONS`.
        encoders: By data types with a coding: the text that makes codes of numbers by an instruction.
        infinity, nan: Literals.
        pointer: Type of a read-only device pointer, with ``{type}``.
        faults: Type of the pointer to the record of faults.
        inline: What functions that kernels call are declared with.
        params: The parameter by which they know those of the kernel.
    """

    storage: Mapping[str, str]
    pointer: str
    faults: str
    functions: Mapping[str, str] = field(default_factory=dict)
    infinity: str = "INFINITY"
    nan: str = "NAN"
    inline: str = "inline"
    params: str = "const Params& p"
    encoders: Mapping[DType, str] = field(default_factory=dict)

    def pointer_to(self, dtype: DType | None, writes: bool = False) -> str:
        """Type of a pointer that an expression reads through, or results go to; without a data type, to the record of
        faults.
        """
        kind = self.faults if dtype is None else self.pointer.format(type=self.storage[dtype.name])
        return kind.replace("const ", "") if writes else kind

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
        register = self.register(dtype)
        greatest = (1 << (31 if register == "int" else 63)) - 1
        if value == -greatest - 1:  # whose magnitude is no literal of the type
            return f"({register}(-{greatest}) - 1)"
        return f"{register}({int(value)})"

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
        loads: For each load: pointer name, address text, and whether it may name elements that do not exist.
        iotas: For each iota: its text.
        anchors: By tensor: the name of the anchor's result. Where the epilogue combines two columns, the odd one's name
            has a 1 after it.
        checks: For each checked index: what its function is told after the index, and whether it may name
            indices that do not exist.
    """

    loads: Mapping[Load, tuple[str, str, bool]]
    iotas: Mapping[Iota, str]
    anchors: Mapping[int, str]
    checks: Mapping[Checked, tuple[str, bool]] = field(default_factory=dict)


_MAX_INLINE_NODES = 64
_MAX_INLINE_TEXT = 1024  # characters


def is_small(expr: Expr) -> bool:
    """Whether an expression written out in place, with what it uses twice written twice, is no long text."""
    stack, count = [expr], 0
    while stack and count <= _MAX_INLINE_NODES:
        count += 1
        stack.extend(children(stack.pop()))
    return not stack


class Printer:
    """Emits statements that compute expressions; equal sub-expressions are computed once.

    Every operation gets a variable of its own, so that the text nests no deeper however long a chain of operations is.
    """

    def __init__(self, dialect: Dialect, names: LeafNames, indent: str = "    ", variable: str = "v") -> None:
        self.dialect, self.names, self.indent, self.variable = dialect, names, indent, variable
        self.lines: list[str] = []
        self._known: dict[Expr, str] = {}
        self._by_text: dict[str, str] = {}
        self._harmless: set[Expr] = set()  # expressions without a load that may leave its tensor
        self._count = 0

    def define(self, expr: Expr, name: str) -> None:
        """Says that `expr` already has a name, such as a finished reduction."""
        self._known[expr] = name

    def scope(self, indent: str) -> Printer:
        """A printer for a nested block: it knows what is known here, and what it learns stays there."""
        inner = Printer(self.dialect, self.names, indent, self.variable)
        inner._known, inner._by_text, inner._count = dict(self._known), dict(self._by_text), self._count
        inner._harmless = self._harmless
        return inner

    def value(self, expr: Expr) -> str:
        """Text for `expr`: a literal or a variable, whose definition is appended to `lines`."""
        choices: dict[Expr, bool] = {}
        stack = [expr]
        while stack:
            node = stack[-1]
            if self._at_hand(node) is not None:
                stack.pop()
                continue
            if node not in choices:
                choices[node] = self._is_guarded_choice(node)
            first = children(node)[:1] if choices[node] else self._parts(node)
            missing = [child for child in first if self._at_hand(child) is None]
            if missing:
                stack.extend(reversed(missing))
            elif choices[node]:
                self._choose(stack.pop())
            else:
                self._name(node, self._text(node, [self._operand(child) for child in self._parts(node)]))
                stack.pop()
        return self._operand(expr)

    def hoist(self, expr: Expr) -> None:
        """Computes the parts of `expr` that read nothing and need nothing but what is known, once for all scopes."""
        known: dict[Expr, bool] = {}
        stack = [expr]
        while stack:
            node = stack[-1]
            reads = isinstance(node, Load | Iota | Checked | Reduce)
            parts = () if reads or self._at_hand(node) is not None else self._parts(node)
            missing = [part for part in parts if part not in known]
            if missing:
                stack.extend(missing)
            else:
                known[node] = self._at_hand(node) is not None or (not reads and all(known[part] for part in parts))
                stack.pop()
        stack, seen = [expr], set[Expr]()
        while stack:
            node = stack.pop()
            if known.get(node):
                self.value(node)
            elif node not in seen and not isinstance(node, Load | Iota | Checked | Reduce):
                seen.add(node)
                stack.extend(reversed(self._parts(node)))

    def variable_of(self, expr: Expr) -> str:
        """As `value`, but always a variable of its own, which nothing else changes."""
        text, name = self.value(expr), self._new_name()
        self.lines.append(f"{self.indent}{self.dialect.register(expr.dtype)} {name} = {text};")
        return name

    def inline(self, expr: Expr) -> str:
        """Text that evaluates `expr`, which `is_small`, in place: a side of it that is not taken reads no memory."""
        known = self._at_hand(expr)
        return self._text(expr, [self.inline(child) for child in self._parts(expr)]) if known is None else known

    def _parts(self, expr: Expr) -> tuple[Expr, ...]:
        """What the text of `expr` is made of."""
        encoding = self._encoding(expr)
        return children(expr) if encoding is None else (encoding[0],)

    def _encoding(self, expr: Expr) -> tuple[Expr, str] | None:
        """The number of which `expr` is the code, and the text that makes it, where the language has one."""
        for kind, text in self.dialect.encoders.items():
            number = encoded_number(expr, kind)
            if number is not None:
                return number, text
        return None

    def _at_hand(self, expr: Expr) -> str | None:
        """The literal or the variable that `expr` is, if it is one already."""
        return self.dialect.literal(expr.value, expr.dtype) if isinstance(expr, Const) else self._known.get(expr)

    def _operand(self, expr: Expr) -> str:
        text = self._at_hand(expr)
        assert text is not None
        return text

    def _name(self, expr: Expr, text: str) -> None:
        """Makes `text` a variable, or finds the one that it is."""
        name = self._by_text.get(text)
        if name is None:
            name = self._by_text[text] = self._new_name()
            self.lines.append(f"{self.indent}{self.dialect.register(expr.dtype)} {name} = {text};")
        self._known[expr] = name

    def _new_name(self) -> str:
        self._count += 1
        return f"{self.variable}{self._count - 1}"

    def _choose(self, expr: Expr) -> None:
        """One of two sides, of which the one not taken must not be evaluated: in one expression, or as a branch."""
        condition, *sides = children(expr)
        test = self._operand(condition)
        if all(map(is_small, sides)):
            text = f"({test} ? {self.inline(sides[0])} : {self.inline(sides[1])})"
            if len(text) <= _MAX_INLINE_TEXT:
                self._name(expr, text)
                return
        name = self._new_name()
        self.lines.append(f"{self.indent}{self.dialect.register(expr.dtype)} {name};")
        for head, side in zip((f"if ({test}) {{", "} else {"), sides, strict=True):
            inner = self.scope(self.indent + "    ")
            value = inner.value(side)
            self.lines += [f"{self.indent}{head}", *inner.lines, f"{inner.indent}{name} = {value};"]
        self.lines.append(f"{self.indent}}}")
        self._known[expr] = name

    def _text(self, expr: Expr, args: list[str]) -> str:
        if isinstance(expr, Call):
            encoding = self._encoding(expr)
            return self.dialect.call(expr.fn, args, expr.dtype) if encoding is None else encoding[1].format(*args)
        if isinstance(expr, Iota):
            return f"{self.dialect.register(expr.dtype)}({self.names.iotas[expr]})"
        if isinstance(expr, Load):
            if expr.ref.tensor in self.names.anchors:
                return self.names.anchors[expr.ref.tensor] + ("1" if expr.ref.view.offset else "")
            pointer, address, _ = self.names.loads[expr]
            if args:
                address = f"{address} + int({args[0]}) * {self._stride(expr)}"
            return f"{self.dialect.register(expr.dtype)}({pointer}[{address}])"
        if isinstance(expr, Checked):
            index, element = args
            rest, _ = self.names.checks[expr]
            return f"{CHECK}({index}, {expr.extent}, {expr.otherwise}, int({element}), {rest})"
        raise TypeError(f"{type(expr).__name__} has no text of its own")

    def _stride(self, load: Load) -> str:
        return str(load.index_stride)

    def _is_guarded_choice(self, expr: Expr) -> bool:
        """Whether a side of it loads what may not exist where the other side is taken."""
        return isinstance(expr, Call) and expr.fn == "where" and any(map(self._is_guarded, expr.args[1:]))

    def _is_guarded(self, expr: Expr) -> bool:
        seen: set[Expr] = set()
        stack = [expr]
        while stack:
            node = stack.pop()
            if isinstance(node, Load) and self.names.loads.get(node, ("", "", False))[2]:
                return True
            if isinstance(node, Checked) and self.names.checks[node][1]:
                return True
            if node not in seen and node not in self._harmless and node not in self._known:
                seen.add(node)
                stack.extend(children(node))
        self._harmless |= seen
        return False
