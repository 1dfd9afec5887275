"""Arithmetic of `bfloat` and `half` in 32-bit floats and integers, for processors without instructions for them.

Where a processor can't convert a type, clang calls a routine of its own runtime library for each element: nothing
provides it, and no loop around it is vectorised. So the LLVM text that clang makes of a kernel, before it optimises,
is rewritten: each operation on such a type becomes the one on `float` between conversions that are integer arithmetic,
inlined, and its values become 16-bit integers, as clang would convert even what it only moves. Conversions round to
nearest even, keep subnormals, and keep a NaN a (quiet) NaN, as the instructions of x86's F16C and Arm do. Every
operation rounds, `a*b+c` twice.

No processor's instruction is taken for bfloat: that of x86 (AVX512-BF16) makes zeros of subnormals.
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["expand_small_floats"]

# By type: how LLVM's names of intrinsics end, and the letter of its constants.
_SUFFIXES = {"half": "f16", "bfloat": "bf16"}
_LETTERS = {"half": "H", "bfloat": "R"}
_TOKEN = re.compile(r'"[^"]*"|(?<![\w.%@$-])(?:(?P<kind>half|bfloat)|0x(?P<letter>[HR])(?P<bits>[0-9A-F]{4}))(?![\w.])')
_TYPE = r"half|bfloat|<\d+ x (?:half|bfloat)>"
_ANY_TYPE = r"<\d+ x \w+>|\w+"
_RESULT = r"^(?P<indent>\s*)(?P<result>%[\w.]+) = "
_BINARY = re.compile(rf"{_RESULT}(?P<op>fadd|fsub|fmul|fdiv|frem) (?P<type>{_TYPE}) (?P<operands>.*)$")
_NEGATION = re.compile(rf"{_RESULT}(?P<op>fneg) (?P<type>{_TYPE}) (?P<operands>.*)$")
_COMPARISON = re.compile(rf"{_RESULT}(?P<op>fcmp \w+) (?P<type>{_TYPE}) (?P<operands>.*)$")
_CONVERSION = re.compile(
    rf"{_RESULT}(?P<op>fptrunc|fpext|sitofp|uitofp|fptosi|fptoui) (?P<source>{_ANY_TYPE}) (?P<operand>.*)"
    rf" to (?P<target>{_ANY_TYPE})$"
)
_INTRINSIC = re.compile(
    rf"{_RESULT}(?:tail )?call (?P<type>{_TYPE}) @llvm\.(?P<op>[a-z]+)\.(?:v\d+)?b?f16\((?P<operands>.*)\)(?: #\d+)?$"
)

# {F} is float, {I} and {S} are the integers of 32 and 16 bits, {B} is a flag, for as many lanes as the function has;
# {number} is a constant in each lane. This one adds 0x7fff and the bit that will be last, and shifts. A NaN keeps its
# upper bits and becomes quiet.
_NARROW_BFLOAT = """
  %bits = bitcast {F} %x to {I}
  %high = lshr {I} %bits, {16}
  %odd = and {I} %high, {1}
  %step = add {I} %odd, {32767}
  %sum = add {I} %bits, %step
  %rounded = lshr {I} %sum, {16}
  %quiet = or {I} %high, {64}
  %nan = fcmp uno {F} %x, {zero}
  %chosen = select {B} %nan, {I} %quiet, {I} %rounded
  %result = trunc {I} %chosen to {S}
"""
_WIDEN_BFLOAT = """
  %wide = zext {S} %x to {I}
  %bits = shl {I} %wide, {16}
  %result = bitcast {I} %bits to {F}
"""
# Normal results: the exponent's bias changes by 112, the last 13 bits are rounded off. Below 2^-14 the addition of 0.5
# rounds to multiples of 2^-24, which are what subnormals count. From 2^16 on it is infinity.
_NARROW_HALF = """
  %bits = bitcast {F} %x to {I}
  %sign = and {I} %bits, {-2147483648}
  %size = xor {I} %bits, %sign
  %shifted = lshr {I} %size, {13}
  %odd = and {I} %shifted, {1}
  %step = add {I} %odd, {-939520001}
  %sum = add {I} %size, %step
  %normal = lshr {I} %sum, {13}
  %magnitude = bitcast {I} %size to {F}
  %aligned = fadd {F} %magnitude, {half}
  %counted = bitcast {F} %aligned to {I}
  %subnormal = sub {I} %counted, {1056964608}
  %small = icmp ult {I} %size, {947912704}
  %finite = select {B} %small, {I} %subnormal, {I} %normal
  %large = icmp uge {I} %size, {1199570944}
  %bounded = select {B} %large, {I} {31744}, {I} %finite
  %payload = and {I} %shifted, {1023}
  %quiet = or {I} %payload, {32256}
  %nan = fcmp uno {F} %x, {zero}
  %positive = select {B} %nan, {I} %quiet, {I} %bounded
  %place = lshr {I} %sign, {16}
  %chosen = or {I} %positive, %place
  %result = trunc {I} %chosen to {S}
"""
# Shifted into place, the bits are the value times 2^-112, subnormal or not; infinities and NaN need their exponent.
_WIDEN_HALF = """
  %wide = zext {S} %x to {I}
  %size = and {I} %wide, {32767}
  %sign = xor {I} %wide, %size
  %moved = shl {I} %size, {13}
  %tiny = bitcast {I} %moved to {F}
  %value = fmul {F} %tiny, {scale}
  %finite = bitcast {F} %value to {I}
  %unquiet = or {I} %moved, {2139095040}
  %quiet = or {I} %unquiet, {4194304}
  %nan = icmp ugt {I} %size, {31744}
  %special = select {B} %nan, {I} %quiet, {I} %unquiet
  %ordinary = icmp ult {I} %size, {31744}
  %positive = select {B} %ordinary, {I} %finite, {I} %special
  %place = shl {I} %sign, {16}
  %bits = or {I} %positive, %place
  %result = bitcast {I} %bits to {F}
"""
_FLOAT_CONSTANTS = {"zero": "0.0", "half": "0.5", "scale": "0x46F0000000000000"}  # the last is 2^112


def expand_small_floats(text: str, kinds: Collection[str]) -> str:
    """LLVM text in which no operation but moves is left on some types.

    Args:
        text: A module in LLVM's assembly language, not yet optimised.
        kinds: Of ``half`` and ``bfloat``, those to expand.
    """
    expansion = _Expansion(frozenset(kinds))
    lines: list[str] = []
    for line in text.split("\n"):
        lines += expansion.expand(line) if _mentions(line) else [line]
    lines += expansion.definitions()
    return "\n".join(line for line in map(expansion.in_integers, lines) if not expansion.is_obsolete(line))


def _mentions(line: str) -> bool:
    return "half" in line or "bfloat" in line


class _Expansion:
    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.needed: dict[str, str] = {}  # definitions of conversions, by name
        self.declared: dict[str, str] = {}  # declarations of intrinsics on floats, by name
        self.temporaries = 0

    def expand(self, line: str) -> list[str]:
        body, metadata = _without_metadata(line)
        if found := _CONVERSION.match(body):
            return self._conversion(line, found)
        for pattern in (_BINARY, _NEGATION, _COMPARISON, _INTRINSIC):
            found = pattern.match(body)
            if found and _element(found["type"]) in self.kinds:
                return self._operation(found, is_intrinsic=pattern is _INTRINSIC, metadata=metadata)
        return [line]

    def definitions(self) -> list[str]:
        return [*self.declared.values(), *self.needed.values()]

    def in_integers(self, line: str) -> str:
        """A line with 16-bit integers for the types."""
        return _TOKEN.sub(self._integer, line) if _mentions(line) else line

    def is_obsolete(self, line: str) -> bool:
        """Whether a line declares what has been replaced, or what is declared again."""
        if not line.startswith("declare "):
            return False
        name = line[line.index("@") : line.index("(")]
        if name in self.declared:
            return line != self.declared[name]
        return any(re.search(rf"\.(v\d+)?{_SUFFIXES[kind]}$", name) for kind in self.kinds)

    def _integer(self, found: re.Match[str]) -> str:
        if found["kind"] in self.kinds:
            return "i16"
        if found["bits"] and found["letter"] in {_LETTERS[kind] for kind in self.kinds}:
            return str(int(found["bits"], 16))
        return found[0]

    def _conversion(self, line: str, found: re.Match[str]) -> list[str]:
        lines: list[str] = []
        source, target, operand, op = found["source"], found["target"], found["operand"], found["op"]
        widens, narrows = _element(source) in self.kinds, _element(target) in self.kinds
        if not (widens or narrows):
            return [line]
        if widens:
            operand = self._widen(source, operand, lines)
            source = _with_element(source, "float")
        reached = _with_element(target, "float") if narrows else target
        if source != reached:
            name = self._temporary() if narrows else found["result"]
            lines.append(f"  {name} = {op} {source} {operand} to {reached}")
            operand = name
        elif not narrows:
            return self._renamed(lines, found["result"])
        return [*lines, self._narrow(target, operand, found["result"])] if narrows else lines

    def _operation(self, found: re.Match[str], *, is_intrinsic: bool, metadata: str) -> list[str]:
        lines: list[str] = []
        kind, op = found["type"], found["op"]
        wide = _with_element(kind, "float")
        operands = _split_operands(found["operands"])
        if is_intrinsic:
            operands = [operand.split(kind, 1)[1].strip() for operand in operands]
        values = [self._widen(kind, operand, lines) for operand in operands]
        if op.startswith("fcmp"):
            return [*lines, f"  {found['result']} = {op} {wide} {', '.join(values)}{metadata}"]
        if op == "fmuladd":
            product = self._float_operation("fmul", wide, values[:2], lines)
            rounded = self._temporary()
            lines.append(self._narrow(kind, product, rounded))
            values, op, is_intrinsic = [self._widen(kind, rounded, lines), values[2]], "fadd", False
        if is_intrinsic:
            result = self._intrinsic(op, wide, values, lines)
        else:
            result = self._float_operation(op, wide, values, lines)
        return [*lines, self._narrow(kind, result, found["result"])]

    def _float_operation(self, op: str, wide: str, values: list[str], lines: list[str]) -> str:
        name = self._temporary()
        lines.append(f"  {name} = {op} {wide} {', '.join(values)}")
        return name

    def _intrinsic(self, op: str, wide: str, values: list[str], lines: list[str]) -> str:
        lanes = _lanes(wide)
        name, function = self._temporary(), f"@llvm.{op}.{f'v{lanes}' if lanes else ''}f32"
        self.declared[function] = f"declare {wide} {function}({', '.join([wide] * len(values))})"
        lines.append(f"  {name} = call {wide} {function}({', '.join(f'{wide} {value}' for value in values)})")
        return name

    def _widen(self, kind: str, value: str, lines: list[str]) -> str:
        name, wide = self._temporary(), _with_element(kind, "float")
        lines.append(f"  {name} = call {wide} {self._function('widen', kind)}({kind} {value})")
        return name

    def _narrow(self, kind: str, value: str, result: str) -> str:
        wide = _with_element(kind, "float")
        return f"  {result} = call {kind} {self._function('narrow', kind)}({wide} {value})"

    def _renamed(self, lines: list[str], result: str) -> list[str]:
        """The last line, giving its value another name."""
        return [*lines[:-1], f"  {result} = {lines[-1].split(' = ', 1)[1]}"]

    def _temporary(self) -> str:
        self.temporaries += 1
        return f"%msl.{self.temporaries}"

    def _function(self, direction: str, kind: str) -> str:
        element, lanes = _element(kind), _lanes(kind)
        name = f"@msl.{direction}.{element}.{lanes}"
        if name not in self.needed:
            self.needed[name] = _definition(name, direction, element, lanes)
        return name


def _definition(name: str, direction: str, element: str, lanes: int) -> str:
    """An inlined function between `element` and float, for a scalar (no lanes) or a vector."""
    types = {"F": "float", "I": "i32", "S": "i16", "B": "i1"}
    types = {letter: _vector(kind, lanes) for letter, kind in types.items()}

    def text_of(found: re.Match[str]) -> str:
        word = found[1]
        if word in types:
            return types[word]
        kind, value = ("float", _FLOAT_CONSTANTS[word]) if word in _FLOAT_CONSTANTS else ("i32", word)
        return f"<{', '.join([f'{kind} {value}'] * lanes)}>" if lanes else value

    bodies = {"narrowbfloat": _NARROW_BFLOAT, "widenbfloat": _WIDEN_BFLOAT}
    bodies |= {"narrowhalf": _NARROW_HALF, "widenhalf": _WIDEN_HALF}
    body = re.sub(r"\{(-?\w+)\}", text_of, bodies[direction + element])
    given, made = (types["S"], types["F"]) if direction == "widen" else (types["F"], types["S"])
    return f"define internal {made} {name}({given} %x) alwaysinline nounwind {{{body}  ret {made} %result\n}}"


def _vector(kind: str, lanes: int) -> str:
    return f"<{lanes} x {kind}>" if lanes else kind


def _lanes(kind: str) -> int:
    """How many elements a vector type has; 0 for a scalar."""
    return int(kind[1:].split()[0]) if kind.startswith("<") else 0


def _element(kind: str) -> str:
    return kind.rstrip(">").split()[-1]


def _with_element(kind: str, element: str) -> str:
    return _vector(element, _lanes(kind))


def _without_metadata(line: str) -> tuple[str, str]:
    """A line, and the `, !name !7` that follows its operands."""
    at = line.find(", !")
    return (line[:at], line[at:]) if at >= 0 else (line, "")


def _split_operands(text: str) -> list[str]:
    """Operands between commas; those within a constant vector are part of it."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "<([{") - (letter in ">)]}")
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]
