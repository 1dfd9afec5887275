"""Turns an exported program into IR in pytorch-ir's schema, and closes the gaps that pytorch-ir leaves.

pytorch-ir reads tensors only from positional arguments, leaves no trace of an optional tensor that is None, and keeps
attributes as torch objects. So the graph is brought into a normal form before, and the attributes into JSON after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch_ir.converter import convert_exported_program

from npu_compiler.artifact.output_structure import usual_structure
from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.output_names import output_structure

__all__ = ["program_to_ir", "program_weights"]

# Larger constants are tables, which belong in the weight file alone; smaller ones also serve the compiler as numbers.
_MOST_INLINE_ELEMENTS = 1024


def program_weights(exported: ExportedProgram) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors an exported program holds.

    Returns:
        Parameters, buffers (also those that a state dict leaves out) and lifted constants by name, each tensor once;
        and for each placeholder of the graph the name its tensor goes by. Tied weights go by the name that comes first.

    Raises:
        ExtractionError: The program holds something other than strided tensors.
    """
    weights: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        name = str(spec.target)
        tensor = exported.state_dict.get(name, exported.constants.get(name))
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise ExtractionError(f"'{name}' is a {type(tensor).__name__}, expected a dense tensor; convert it first")
        tensor = tensor.detach()
        canonical = first.setdefault(_identity(tensor, name), name)
        weights[canonical] = tensor
        names[spec.arg.name] = canonical
    return weights, names


def _identity(tensor: torch.Tensor, name: str) -> tuple[object, ...]:
    """Equal for tensors that are the same memory read the same way."""
    if tensor.numel() == 0:
        return (name,)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def program_to_ir(exported: ExportedProgram, weight_names: Mapping[str, str], model_name: str) -> dict[str, Any]:
    """Converts an exported program; its graph is changed on the way.

    Args:
        exported: A program in which `export` found nothing to refuse.
        weight_names: Name of the weight by placeholder, as `program_weights` gives it.
        model_name: Name to write into the IR.

    Raises:
        ExtractionError: An attribute is of a kind that JSON cannot hold.
    """
    absent = {}
    for node in list(exported.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            exported.graph.erase_node(node)  # states what the IR's own shapes and dtypes say
        elif isinstance(node.target, torch._ops.OpOverload):
            _bind_positionally(node)
            absent[node.name] = _absent_tensors(node)
    ir: dict[str, Any] = convert_exported_program(exported, model_name=model_name).to_dict()
    for entry in ir["nodes"]:
        attrs = {key: _json(value, f"node '{entry['name']}', '{key}'") for key, value in entry["attrs"].items()}
        entry["attrs"] = attrs | absent.get(entry["name"], {})
    changed = [spec for spec in exported.graph_signature.output_specs if spec.kind is OutputKind.USER_INPUT_MUTATION]
    del ir["graph_outputs"][: len(changed)]  # the model returns them too
    structure = output_structure(exported, ir["model_name"])
    if structure != usual_structure(len(ir["graph_outputs"])):
        ir["output_structure"] = structure
    ir["weight_name_mapping"] = dict(weight_names)
    canonical = set(weight_names.values())
    ir["weights"] = [entry for entry in ir["weights"] if entry["name"] in canonical]
    constants = _inline_constants(exported)
    return ir | ({"constants": constants} if constants else {})


def _bind_positionally(node: Node) -> None:
    """Gives a node its arguments by position, the defaults between them spelled out; plain keyword-only ones stay."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    positional = [argument for argument in arguments if not argument.kwarg_only]
    count = len(positional) if node.kwargs else len(node.args)
    tensors = [i for i, argument in enumerate(arguments) if isinstance(given.get(argument.name), Node)]
    count = max([count, *(i + 1 for i in tensors)])
    node.args = tuple(given.get(argument.name, argument.default_value) for argument in arguments[:count])
    node.kwargs = {a.name: given[a.name] for a in arguments[count:] if a.name in given}


def _absent_tensors(node: Node) -> dict[str, None]:
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    values = [*node.args, *(node.kwargs.get(argument.name) for argument in arguments[len(node.args) :])]
    return {
        argument.name: None
        for argument, value in zip(arguments, values, strict=True)
        if value is None and str(argument.type) == "Optional[Tensor]"
    }


def _json(value: object, where: str) -> Any:
    """The value as JSON holds it: dtypes, devices, layouts and memory formats by name; infinities stay floats."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(item, where) for item in value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return value.type
    raise ExtractionError(
        f"{where}: given {value!r:.80} ({type(value).__name__}), expected a number, a string, a dtype, a device or a "
        "list of them; compute it outside of the model"
    )


def _inline_constants(exported: ExportedProgram) -> dict[str, dict[str, Any]]:
    constants = {}
    for spec in exported.graph_signature.input_specs:
        tensor = exported.constants.get(str(spec.target)) if spec.kind is InputKind.CONSTANT_TENSOR else None
        if isinstance(tensor, torch.Tensor) and tensor.numel() <= _MOST_INLINE_ELEMENTS:
            constants[str(spec.target)] = {"data": tensor.tolist(), "dtype": str(tensor.dtype).removeprefix("torch.")}
    return constants
