"""Results that an epilogue stores beside its own: made of these elementwise, or sums of neighbours of a row."""

from __future__ import annotations

from collections.abc import Sequence

from cuda_compiler.dialect import CUDA, SUM_OF_LANES
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.positions import STORED, Follower
from npu_compiler.tensor.expr import Reduce

__all__ = ["follower_elements", "follower_stores"]


def follower_elements(followers: Sequence[Follower], printer: Printer) -> list[str]:
    """Statements for one of the results, `u`, of a pack that are behind it."""
    lines = [f"        const float {STORED} = float(result[u]);"] if followers else []
    for number, follower in enumerate(followers):
        inner, expr = printer.scope("        "), follower.group.expr
        value = inner.value(expr.args[0] if isinstance(expr, Reduce) else expr)
        storage = CUDA.storage[follower.group.output.dtype.name]
        kept = f"more{number} += {value};" if isinstance(expr, Reduce) else f"more{number}[u] = {storage}({value});"
        lines += ["        {", *inner.lines, f"        {kept}", "        }"]
    return lines


def follower_stores(followers: Sequence[Follower], size: int, inner: str) -> tuple[list[str], list[str]]:
    """Statements ahead of the loop over a pack's results, and behind it.

    Args:
        followers: What is stored.
        size: Results of a pack: those of four neighbouring lanes, for sums, are the neighbours that are added.
        inner: Position of the first one along the row.
    """
    ahead, behind = list[str](), list[str]()
    for number, follower in enumerate(followers):
        name, expr = f"more{number}", follower.group.expr
        if isinstance(expr, Reduce):
            ahead.append(f"    float {name} = 0.0f;")
            behind += [
                f"    {name} = {SUM_OF_LANES}({name});",
                f"    if ({inner} % {expr.extent} == 0) {{",
                f"        const int part = {inner} / {expr.extent};",
                f"        {follower.pointer}[{follower.address}] = {name};",
                "    }",
            ]
        else:
            ahead.append(f"    Pack<{CUDA.storage[follower.group.output.dtype.name]}, {size}> {name};")
            behind.append(f"    store_pack({follower.pointer} + {follower.address}, {name});")
    return ahead, behind
