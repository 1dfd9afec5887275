"""Builds IR as the extraction writes it, node by node, without an export: shapes come from torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # defines the ops of quantized_decomposed

__all__ = ["IRBuilder", "Value", "overload_of"]

Attribute = Any


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name, its shape and dtype as a meta tensor, and the node that makes it."""

    name: str
    meta: torch.Tensor
    producer: str | None = None
    index: int = 0

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "name": self.name,
            "shape": list(self.meta.shape),
            "dtype": _spelled(self.meta.dtype),
        }
        if self.producer is not None:
            entry |= {"producer_node": self.producer, "producer_output_idx": self.index}
        return entry


def overload_of(op: str) -> torch._ops.OpOverload:
    """The torch operator of a name such as ``aten.add.Tensor``."""
    namespace, name, overload = op.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(found, torch._ops.OpOverload)
    return found


class IRBuilder:
    """A graph under construction."""

    def __init__(self, model_name: str = "model") -> None:
        self.model_name = model_name
        self._inputs: list[Value] = []
        self._weights: dict[str, Value] = {}
        self._nodes: list[dict[str, Any]] = []

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Value:
        value = Value(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))
        self._inputs.append(value)
        return value

    def weight(self, key: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Value:
        """A parameter or buffer that the weight file calls `key`."""
        value = Value(f"p_{key.replace('.', '_')}", torch.empty(tuple(shape), dtype=dtype, device="meta"))
        self._weights[key] = value
        return value

    def call(self, op: str, *args: Any, name: str | None = None, **kwargs: Any) -> Value:
        """Adds a node of one result, and gives that."""
        (result,) = self.call_all(op, *args, name=name, **kwargs)
        return result

    def call_all(self, op: str, *args: Any, name: str | None = None, **kwargs: Any) -> tuple[Value, ...]:
        """Adds a node, and gives all its results; each of several comes through a ``getitem`` node of its own."""
        overload = overload_of(op)
        node = name or f"{overload._schema.name.partition('::')[2]}_{len(self._nodes)}"
        results = _meta_results(overload, args, kwargs)
        single = len(results) == 1 and not str(overload._schema.returns[0].type).startswith("List")
        outputs = [
            Value(node if single else f"{node}_{index}", meta, node, index) for index, meta in enumerate(results)
        ]
        positional, keywords = _bound(overload, args, kwargs)
        self._add(node, op, _tensors(positional), outputs, _attributes(overload, positional, keywords))
        return tuple(outputs) if single else tuple(self._getitem(node, outputs, i) for i in range(len(outputs)))

    def build(self, *outputs: Value) -> dict[str, Any]:
        """The IR with these outputs."""
        return {
            "model_name": self.model_name,
            "pytorch_version": torch.__version__,
            "graph_inputs": [value.to_json() for value in self._inputs],
            "graph_outputs": [value.to_json() for value in outputs],
            "weights": [value.to_json() | {"name": key} for key, value in self._weights.items()],
            "weight_name_mapping": {value.name: key for key, value in self._weights.items()},
            "nodes": self._nodes,
        }

    def _getitem(self, node: str, outputs: list[Value], index: int) -> Value:
        item = Value(f"{node}_item_{index}", outputs[index].meta, f"{node}_item_{index}")
        self._add(item.name, "<built-in function getitem>", outputs, [item], {"index": index})
        return item

    def _add(self, name: str, op: str, inputs: list[Value], outputs: list[Value], attrs: dict[str, Attribute]) -> None:
        made = [{k: v for k, v in output.to_json().items() if not k.startswith("producer")} for output in outputs]
        read = [value.to_json() for value in inputs]
        self._nodes.append({"name": name, "op_type": op, "inputs": read, "outputs": made, "attrs": attrs})


def _meta_results(overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    try:
        result = _called_on("meta", overload, args, kwargs)
    except NotImplementedError:  # some releases of torch tell no shapes of `_convolution`: its CPU kernel does
        result = _called_on("cpu", overload, args, kwargs)
    if result is None:
        return []
    return [t.to("meta") for t in ([result] if isinstance(result, torch.Tensor) else result)]


def _called_on(device: str, overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """What an op gives for tensors of a device that hold zeros, if anything."""

    def argument(value: Any) -> Any:
        if isinstance(value, Value):
            return torch.zeros_like(value.meta, device=device)
        if isinstance(value, (list, tuple)):
            return [argument(item) for item in value]
        return torch.device(device) if isinstance(value, torch.device) else value

    return overload(*(argument(arg) for arg in args), **{key: argument(value) for key, value in kwargs.items()})


def _bound(overload: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position as far as one is given, defaults between them spelled out; plain keyword-only ones stay."""
    arguments = overload._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    count = sum(not argument.kwarg_only for argument in arguments) if kwargs else len(args)
    count = max([count, *(i + 1 for i, a in enumerate(arguments) if isinstance(given.get(a.name), Value))])
    positional = [given.get(a.name, a.default_value) for a in arguments[:count]]
    return positional, {a.name: given[a.name] for a in arguments[count:] if a.name in given}


def _tensors(positional: list[Any]) -> list[Value]:
    found: list[Value] = []
    for value in positional:
        if isinstance(value, Value):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Value)]
    return found


def _attributes(overload: torch._ops.OpOverload, positional: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    attrs = {key: _plain(value) for key, value in keywords.items()}
    arguments = overload._schema.arguments
    lists = [value for value in positional if isinstance(value, (list, tuple)) and _tensors([value])]
    if lists:
        attrs["_tensor_list_sizes"] = [len(_tensors([value])) for value in lists]
    if any(item is None for value in lists for item in value):
        attrs["_tensor_list_none_masks"] = [[item is None for item in value] for value in lists if None in value]
    for argument, value in zip(arguments, positional, strict=False):
        if not _tensors([value]) and not (value is None and "Tensor" in str(argument.type)):
            attrs[argument.name] = _plain(value)
    values = [*positional, *(keywords.get(a.name) for a in arguments[len(positional) :])]
    absent = [a.name for a, v in zip(arguments, values, strict=True) if v is None and str(a.type) == "Optional[Tensor]"]
    return attrs | dict.fromkeys(absent)


def _plain(value: Any) -> Any:
    """An attribute as JSON holds it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return _spelled(value)
    return value.type if isinstance(value, torch.device) else value


def _spelled(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")
