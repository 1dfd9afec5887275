"""Takes what computes nothing out of an exported program: assertions, tensors copied onto themselves, idle draws."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

__all__ = ["remove_idle"]

_ASSERTIONS = {"_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size"}


def remove_idle(exported: ExportedProgram) -> None:
    """Removes assertions with what only they read, copies of a tensor onto itself, and random numbers without a reader.

    An assertion about values cannot stop a program on the device; that a model has one is no reason to refuse it. A
    buffer that is assigned itself, as in ``self.table = self.table.to(x.device)``, appears as such a copy. Models that
    leave out layers at random draw a number in eval mode, too.
    """
    for node in list(exported.graph.nodes):
        if _is_assertion(node) or _copies_itself(node):
            exported.graph.erase_node(node)
    for node in reversed(list(exported.graph.nodes)):
        if not node.users and (_gives_number(node) or _draws(node)):
            exported.graph.erase_node(node)
    exported.graph_module.recompile()


def _is_assertion(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.users:
        return False
    return node.target.namespace == "aten" and node.target._opname in _ASSERTIONS


def _gives_number(node: Node) -> bool:
    """Whether a node reads a number off a tensor, or computes with such numbers."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _draws(node: Node) -> bool:
    """Whether a node gives random numbers, and changes no tensor."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags and not node.target._schema.is_mutable


def _copies_itself(node: Node) -> bool:
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    target, source = (item.meta.get("val") if isinstance(item, Node) else None for item in node.args[:2])
    if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return _place(target) == _place(source)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory read the same way."""
    memory = tensor.untyped_storage()._cdata
    return (memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
