"""Writes a part of a model as an IR of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from npu_compiler.ir import OpNode, TensorSpec
from npu_compiler.partitioning.carried_graph import CarriedGraph, entry

__all__ = ["SubIRWriter"]


class SubIRWriter:
    """Cuts IRs out of a model.

    A part for the device is written in the data types of the device, so that it does not depend on the rest of the
    model what a tensor of it is stored in; the field ``compute_dtype`` says that this is so. A part for the CPU is
    written as the model declares it.
    """

    def __init__(
        self,
        carried: CarriedGraph,
        device_tensors: Mapping[str, TensorSpec],
        device_attrs: Mapping[str, Mapping[str, Any]],
        compute_dtype: str,
    ) -> None:
        """Prepares.

        Args:
            carried: The model, without anything that changes in place.
            device_tensors: Every tensor in the data type of the device.
            device_attrs: The attributes of each node there.
            compute_dtype: ``float16`` or ``bfloat16``.
        """
        self._carried, self._graph, self._compute_dtype = carried, carried.graph, compute_dtype
        self._device_tensors, self._device_attrs = device_tensors, device_attrs
        nodes = carried.graph.nodes
        self._makers = {name: (node.name, index) for node in nodes for index, name in enumerate(node.outputs)}

    def write(
        self, name: str, nodes: Sequence[OpNode], inputs: Iterable[str], outputs: Iterable[str], on_device: bool
    ) -> dict[str, Any]:
        """The IR of `nodes`, which read `inputs` and weights, and give `outputs`."""
        tensors = self._tensors(on_device)
        members = {node.name for node in nodes}
        read = dict.fromkeys(name for node in nodes for name in node.tensors())
        keys = {name: self._carried.weight_keys[name] for name in read if name in self._carried.weight_keys}
        constants = {key: self._carried.constants[key] for key in keys.values() if key in self._carried.constants}
        ir: dict[str, Any] = {
            "model_name": name,
            "graph_inputs": [entry(tensors[tensor]) for tensor in inputs],
            "graph_outputs": [entry(tensors[tensor]) for tensor in outputs],
            "weights": list({key: entry(tensors[tensor], key) for tensor, key in keys.items()}.values()),
            "weight_name_mapping": keys,
            "nodes": [self._node(node, on_device, members) for node in nodes],
        }
        if constants:
            ir["constants"] = constants
        if on_device:
            ir["compute_dtype"] = self._compute_dtype
        return ir

    def _node(self, node: OpNode, on_device: bool, members: set[str]) -> dict[str, Any]:
        raw, tensors = self._carried.raw[node.name], self._tensors(on_device)
        return {
            "name": node.name,
            "op_type": raw["op_type"],
            "inputs": [self._operand(tensors[name], members) for name in node.tensors()],
            "outputs": [entry(tensors[name]) for name in node.outputs],
            "attrs": dict(self._device_attrs.get(node.name, node.attrs) if on_device else node.attrs),
        }

    def _tensors(self, on_device: bool) -> Mapping[str, TensorSpec]:
        return self._device_tensors if on_device else self._graph.tensors

    def _operand(self, spec: TensorSpec, members: set[str]) -> dict[str, Any]:
        maker, index = self._makers.get(spec.name, ("", 0))
        produced = {"producer_node": maker, "producer_output_idx": index} if maker in members else {}
        return entry(spec) | produced
