"""The epilogue of a matmul, convolution, pooling or attention: what happens to a result between register and memory."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.anchors import Epilogue, function, pointer_parameters
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import epilogue_positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch

__all__ = ["anchor_epilogue", "anchor_launch", "single_launch"]

anchor_launch = KERNELS.launch


def single_launch(launch: Launch, group: Group, lowering: Lowering) -> KernelCall:
    """A launch that computes a group around a problem.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    return anchor_launch(launch, anchor_epilogue(group, lowering), lowering)


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
    assert group.anchor is not None
    own = METAL.register(group.anchor.dtype)
    values = f"{own} value, {own} value1" if group.pairs == 2 else f"{own} value"
    pointers, kind = pointer_parameters(operands, METAL), METAL.register(group.expr.dtype)
    epilogue = f"METAL_FUNC {kind} epilogue({values}, {positions}, {pointers}constant Params& p)"
    output_index = f"METAL_FUNC int output_index({positions}, constant Params& p)"
    functions = (
        function(epilogue, (*found.statements, *printer.lines), result),
        function(output_index, found.statements, operands.output),
    )
    return Epilogue(group, found, "\n".join(functions))
