"""What would let a node run on the device, in words; what is said to lower was lowered to find out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from npu_compiler.dtypes import FLOAT32, INT32, DType
from npu_compiler.ir import OpNode, TensorSpec
from npu_compiler.op_support import Support
from npu_compiler.ops.registry import definition, get_supported_ops, is_in_place

__all__ = ["way_out"]

_GUIDE = "see CONTRIBUTING.md"


def way_out(
    node: OpNode,
    is_refused: bool,
    tensors: Mapping[str, TensorSpec],
    lowers: Callable[[OpNode, Mapping[str, TensorSpec]], Support],
) -> str:
    """What to change, in the compiler or in the model.

    Args:
        node: A node on the CPU that follows no other.
        is_refused: Whether it was refused itself; else it changes memory in place that others share, or its group does
            too little.
        tensors: The model's tensors in the data types of the device.
        lowers: Whether a node lowers with the tensors given.
    """
    if not is_refused:
        if is_in_place(node.op):
            return "write it as an operation that gives a new tensor"
        return "it goes to the device by itself once nothing else is left on the CPU"
    if lowers(node, tensors):
        return "it lowers: let is_op_supported accept it"
    known = definition(node.op)
    if known is None:
        other = _other_overloads(node.op)
        instead = f", or call {', '.join(other)} instead where that means the same" if other else ""
        return f"define {node.op} ({_GUIDE}){instead}"
    for wanted in (FLOAT32, INT32):
        changed = _converted(node, tensors, wanted)
        if changed is not None and lowers(node, changed):
            return f"compute it in {wanted.name}"
    form = "give it in a form that lowers, as the reason says"
    return f"{form}; or extend its definition in npu_compiler/ops/{known.family}.py"


def _other_overloads(op: str) -> list[str]:
    packet = op.rpartition(".")[0]
    return [known for known in get_supported_ops() if known.rpartition(".")[0] == packet]


def _converted(node: OpNode, tensors: Mapping[str, TensorSpec], wanted: DType) -> Mapping[str, TensorSpec] | None:
    """The tensors, with those of the node in another type of the same category; None where that changes nothing."""
    specs = [tensors[name] for name in (*node.tensors(), *node.outputs)]
    changed = {spec.name: replace(spec, dtype=wanted) for spec in specs if spec.dtype.category == wanted.category}
    if all(tensors[name].dtype is wanted for name in changed):
        return None
    return {**tensors, **changed}
