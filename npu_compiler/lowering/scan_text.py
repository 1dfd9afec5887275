"""The functions that a kernel of a scan is made of, in the common subset of the kernel languages."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.lowering.anchors import function
from npu_compiler.lowering.dialect import Dialect, LeafNames, Printer
from npu_compiler.lowering.loops import combine_text
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.tensor.expr import Expr, Slot, walk

__all__ = ["scan_functions", "state_bytes"]


def scan_functions(scan: Scan, dialect: Dialect) -> str:
    """The struct ``State``, and the functions ``nothing``, ``combine``, ``lift`` and ``value_of`` of it.

    ``lift`` takes an element and its position; ``value_of`` gives a result.
    """
    count = len(scan.lift)
    fields = [f"s{item}" for item in range(count)]
    kinds = [dialect.register(number.dtype) for number in scan.lift]
    declared = " ".join(f"{kind} {name};" for kind, name in zip(kinds, fields, strict=True))
    identity = [dialect.literal(const.value, const.dtype) for const in scan.combination.identity]
    left, right = ([f"{side}.{name}" for name in fields] for side in "ab")
    lifted = _printed(scan.lift, ("element", "position"), dialect)
    (finished,), lines = _printed((scan.value,), left, dialect)
    combined, both = combine_text(scan.combination, left, right, dialect, "    ")
    parts: tuple[tuple[str, tuple[list[str], list[str]]], ...] = (
        ("nothing()", (identity, [])),
        ("combine(State a, State b)", (both, combined)),
        (f"lift({dialect.register(scan.source.dtype)} element, int position)", lifted),
    )
    return "\n".join(
        [
            f"struct State {{ {declared} }};",
            *(_function(head, values, lines, dialect) for head, (values, lines) in parts),
            function(f"{dialect.inline} {dialect.register(scan.value.dtype)} value_of(State a)", lines, finished),
        ]
    )


def state_bytes(scan: Scan) -> int:
    """What an array of states takes for each, at the most."""
    return 8 * len(scan.lift)


def _printed(exprs: Sequence[Expr], slots: Sequence[str], dialect: Dialect) -> tuple[list[str], list[str]]:
    """The values of expressions over slots that have names, and the statements ahead of them."""
    printer = Printer(dialect, LeafNames({}, {}, {}))
    for node in (node for expr in exprs for node in walk(expr)):
        if isinstance(node, Slot):
            printer.define(node, slots[node.number])
    return [printer.value(expr) for expr in exprs], printer.lines


def _function(head: str, values: Sequence[str], lines: Sequence[str], dialect: Dialect) -> str:
    stores = [f"    result.s{item} = {value};" for item, value in enumerate(values)]
    return function(f"{dialect.inline} State {head}", (*lines, "    State result;", *stores), "result")
