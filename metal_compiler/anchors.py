"""The epilogue of a matmul, convolution, pooling or attention: what happens to a result between register and memory."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from metal_compiler.skeleton import KERNELS, pointer_types
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import epilogue_positions
from npu_compiler.lowering.target import Lowering

__all__ = ["anchor_epilogue", "anchor_launch"]

anchor_launch = KERNELS.launch


def anchor_epilogue(group: Group, lowering: Lowering) -> Epilogue:
    """The functions that `store.metal` and the kernels call: ``epilogue`` and ``output_index``.

    Raises:
        OpRefusal: An operand is too large.
    """
    found = epilogue_positions(group, lowering, "value", sized=True)
    operands = found.operands
    printer = Printer(METAL, operands.names)
    result = printer.value(group.expr)
    positions = "int batch, int row, int col"
    values = "float value, float value1" if group.pairs == 2 else "float value"
    pointers = "".join(f"{kind} e{number}, " for number, kind in enumerate(pointer_types(operands)))
    lines = [
        f"METAL_FUNC {METAL.register(group.expr.dtype)} epilogue({values}, {positions}, {pointers}constant Params& p)",
        "{",
        *found.statements,
        *printer.lines,
        f"    return {result};",
        "}",
        f"METAL_FUNC int output_index({positions}, constant Params& p)",
        "{",
        *found.statements,
        f"    return {operands.output};",
        "}",
    ]
    return Epilogue(group, found, "\n".join(lines))
