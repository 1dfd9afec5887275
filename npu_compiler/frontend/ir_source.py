"""What people hand over as a model: a path, JSON, pytorch-ir's own object, or what `extract` gave; all become JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]

from npu_compiler.errors import IRError

__all__ = ["IRObject", "IRSource", "is_ir_source", "load_json", "plain_node"]


class IRObject(Protocol):
    """pytorch-ir's `IR`, as `torch_ir.extract_ir` gives it."""

    def to_dict(self) -> dict[str, Any]: ...


class Extracted(Protocol):
    """What `npu_compiler.extract` gives."""

    @property
    def ir(self) -> dict[str, Any]: ...


IRSource = str | os.PathLike[str] | Mapping[str, Any] | IRObject | Extracted


def is_ir_source(value: object) -> bool:
    """Whether a value is of a kind that `load_json` takes."""
    return isinstance(value, (str, os.PathLike, Mapping)) or _mapping_of(value) is not None


def load_json(source: IRSource) -> Mapping[str, Any]:
    """The IR as JSON has it: data types, devices and the like by their names.

    Args:
        source: Path of an IR JSON file; the IR as a mapping, which may hold torch's data types and devices as objects
            or by their full names; pytorch-ir's `IR`; or what `npu_compiler.extract` gives.

    Raises:
        IRError: The file cannot be read, is not JSON, or holds something other than an object; or `source` is none of
            these.
    """
    if isinstance(source, (str, os.PathLike)):
        return _read(source)
    data = source if isinstance(source, Mapping) else _mapping_of(source)
    if data is None:
        raise IRError(
            f"given a {type(source).__name__}, expected the path of an IR JSON file, the IR as a dict, pytorch-ir's IR "
            "or what npu_compiler.extract gives; a torch.nn.Module becomes one by npu_compiler.extract(model, inputs)"
        )
    return _plain_ir(data)


def _mapping_of(source: object) -> Mapping[str, Any] | None:
    """The mapping that an object holds or turns into; classes are no such objects."""
    if isinstance(source, type):
        return None
    ir = getattr(source, "ir", None)
    if isinstance(ir, Mapping):
        return ir
    to_dict = getattr(source, "to_dict", None)
    data = to_dict() if callable(to_dict) else None
    return data if isinstance(data, Mapping) else None


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise IRError(f"cannot read '{path}': {error.strerror}; give the path of an IR JSON file") from error
    except UnicodeDecodeError as error:
        raise IRError(
            f"'{path}' is not JSON but a binary file; give the IR that npu_compiler.extract wrote. A .npubin is "
            "compiled already, and runs as it is"
        ) from error
    except (ValueError, RecursionError) as error:
        raise IRError(f"'{path}' is not JSON ({error}); make one with npu_compiler.extract") from error
    if not isinstance(data, dict):
        raise IRError(
            f"'{path}' holds a {type(data).__name__}, expected an IR object; make one with npu_compiler.extract"
        )
    return data


_PLAIN = frozenset({type(None), bool, int, float, str})
_SPECS = ("graph_inputs", "graph_outputs", "weights")
_BY_NAME: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("dtype", "layout", "memory_format"), lambda value: str(value).removeprefix("torch.")),
    "device": lambda value: str(value.type),
}


def _plain_ir(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same IR with what only Python can hold by its name; where there is nothing of the kind, itself."""
    specs = {}
    if not _is_plain([data.get(key) for key in (*_SPECS, "nodes")]):
        specs = {key: _plain(data[key]) for key in _SPECS if key in data}
        nodes = data.get("nodes")
        if isinstance(nodes, (list, tuple)):
            specs["nodes"] = _unchanged_or(nodes, [plain_node(node) for node in nodes])
    if isinstance(data.get("constants"), Mapping):
        specs["constants"] = {key: _plain_constant(value) for key, value in data["constants"].items()}
    return data if all(value is data[key] for key, value in specs.items()) else {**data, **specs}


def _is_plain(value: Any) -> bool:
    """Whether a value has nothing that JSON has not, which msgpack tells many times sooner than a walk in Python."""
    try:
        msgpack.packb(value, strict_types=True)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def plain_node(node: Any) -> Any:
    """A node as JSON has it.

    pytorch-ir leaves a tensor that was given by keyword alone among the attributes, as the exported graph's own node;
    it becomes one more input, whose parameter ``_tensor_keywords`` names.
    """
    if not isinstance(node, Mapping) and not isinstance(node, type) and callable(getattr(node, "to_dict", None)):
        node = node.to_dict()
    if not isinstance(node, Mapping):
        return node
    attrs = node.get("attrs")
    attrs = attrs if isinstance(attrs, Mapping) else {}
    keywords = {key: value for key, value in attrs.items() if _is_graph_node(value)}
    if keywords:
        kept = {key: value for key, value in attrs.items() if key not in keywords}
        inputs = [*node.get("inputs", ()), *map(_node_spec, keywords.values())]
        node = {**node, "attrs": kept | {"_tensor_keywords": list(keywords)}, "inputs": inputs}
    return _plain(node)


def _is_graph_node(value: object) -> bool:
    return type(value).__module__ == "torch.fx.node" and hasattr(value, "meta")


def _node_spec(node: Any) -> dict[str, Any]:
    value = node.meta.get("val")
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise IRError(f"'{node}' is no tensor of known shape; extract the model with npu_compiler.extract")
    return {"name": str(node), "shape": list(value.shape), "dtype": value.dtype}


def _plain(value: Any) -> Any:
    """A value in which torch's data types, devices, layouts and memory formats go by name, and tuples are lists."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        same = kind is list and _PLAIN.issuperset(map(type, value))  # sizes, mostly
        return value if same else _unchanged_or(value, [_plain(item) for item in value])
    if kind is dict or isinstance(value, Mapping):
        plain = {key: item if type(item) in _PLAIN else _plain(item) for key, item in value.items()}
        return value if all(plain[key] is item for key, item in value.items()) else plain
    by_name = _BY_NAME.get(kind.__name__) if kind.__module__ == "torch" else None
    return value if by_name is None else by_name(value)


def _unchanged_or(given: Any, plain: list[Any]) -> Any:
    same = isinstance(given, list) and all(a is b for a, b in zip(given, plain, strict=True))
    return given if same else plain


def _plain_constant(value: Any) -> Any:
    """The elements of a constant; a tensor among them becomes what JSON has."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return {"data": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    return _plain(value) if isinstance(value, Mapping) and "data" not in value else value
