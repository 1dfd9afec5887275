"""What an epilogue knows of whole rows: sums over rows of another tensor, from which a factor is made."""

from __future__ import annotations

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.dialect import CUDA
from npu_compiler.dtypes import FLOAT32
from npu_compiler.lowering.anchors import function, pointer_parameters
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.operands import Operands, merge_groups
from npu_compiler.lowering.positions import epilogue_positions
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Expr, Load, children, has_reduce, leaves, reductions, substitute
from npu_compiler.tensor.view import View

__all__ = ["with_row_value"]

_SIZE = 4  # floats that are read at a time
_NAME = "value_of_row"


def with_row_value(around: AnchoredGroup) -> AnchoredGroup:
    """A group whose epilogue makes a value of sums over rows, as one that reads it, ready, once for each row.

    Where its expression has no such value in it, the group is as it was.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    group, lowering = around.group, around.lowering
    value = _value_of_row(group.expr)
    if value is None or group.problem is None:
        return around
    load = leaves(value)[0]
    first = load.ref.apply(("slice", (len(load.ref.view.shape) - 1, 0, 1, 1)))
    assert first is not None
    place = Load(first, FLOAT32)  # stands for the value: as a load it is fetched as what is the same all along a row
    nowhere, merge = View(group.shape, (0,) * len(group.shape)), merge_groups(group.problem.dims)
    group = changed(group, expr=substitute(group.expr, lambda node: place if node is value else None))
    found = epilogue_positions(group, lowering, "sum")
    read = Operands.resolve([value], nowhere, lowering.tensors, ("batch", "row", "col"), merge, prefix="r")
    pointer, _, _ = found.operands.names.loads[place]
    called = {place: (f"{_NAME}(batch, row, {pointer}, p)", "0", False)}
    names = changed(found.operands.names, loads={**found.operands.names.loads, **called})
    operands = changed(found.operands, names=names, fields=(*found.operands.fields, *read.fields))
    return AnchoredGroup(group, changed(found, operands=operands, functions=_text(value, read)), lowering)


def _value_of_row(expr: Expr) -> Expr | None:
    """The largest part of an expression that reads nothing but sums over rows of dense tensors of float32; None without
    one.
    """
    stack = [expr]
    while stack:
        node = stack.pop()
        if not has_reduce(node):
            continue
        summed = {load for each in reductions(node) for load in leaves(each)}
        if summed.issuperset(leaves(node)):
            return node
        stack += children(node)
    return None


def _text(value: Expr, read: Operands) -> str:
    """The function; each sum is added up in a fixed order, by every thread that wants it."""
    printer, lines = Printer(CUDA, read.names), list[str]()
    for number, each in enumerate(reductions(value)):
        ((pointer, address, _),) = (read.names.loads[load] for load in leaves(each))
        total, size = f"total{number}", 1 if each.extent % _SIZE else _SIZE
        lines += [
            f"    float {total}[{size}] = {{}};",
            "    #pragma unroll 16",
            f"    for (int col = 0; col < {each.extent}; col += {size}) {{",
            f"        const Pack<float, {size}> part = load_pack<{size}>({pointer} + {address});",
            "        #pragma unroll",
            f"        for (int u = 0; u < {size}; ++u) {{ {total}[u] += part[u]; }}",
            "    }",
        ]
        printer.define(each, f"({' + '.join(f'{total}[{u}]' for u in range(size))})")
    result = printer.value(value)
    head = f"Pack<float, 1> {_NAME}(int batch, int row, {pointer_parameters(read, CUDA)}const Params& p)"
    return function(f"__device__ __forceinline__ {head}", [*lines, *printer.lines], f"{{{result}}}")
