"""The op registry: every ATen op, once, with the parameters of its schema.

An op's definition is a function of symbolic tensors. Its parameters are named as in the ATen schema, so that the reader
binds tensors and attributes by name. Annotations say what a parameter may be: ``Tensor``, ``Tensor | None``,
``Tensor | Number``, ``Sequence[Tensor]``, or anything else for an attribute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from npu_compiler.errors import IRError, UnsupportedOpError

__all__ = ["OpDefinition", "Parameter", "bind", "canonical", "definition", "get_supported_ops", "op"]

F = TypeVar("F", bound=Callable[..., Any])
_MISSING = inspect.Parameter.empty


class Kind(Enum):
    """What a parameter of an op binds to."""

    TENSOR = "Tensor"
    OPTIONAL = "Tensor | None"
    TENSOR_OR_NUMBER = "Tensor | Number"
    TENSORS = "Sequence[Tensor]"
    ATTRIBUTE = ""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an op: its ATen name, what it binds to, and its default, if it has one."""

    name: str
    kind: Kind
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is _MISSING

    def takes_attribute(self, value: object) -> bool:
        """Whether it may be an attribute: anything but a tensor's parameter, and None for an optional tensor."""
        return self.kind in (Kind.ATTRIBUTE, Kind.TENSOR_OR_NUMBER) or (self.kind is Kind.OPTIONAL and value is None)


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """An op: the ATen names it goes by, its parameters, and the function that defines it.

    Attributes:
        names: ATen names with overload; in-place variants are the same op.
        family: Module it is defined in, for documentation.
        parameters: In the order of the ATen schema.
        function: Takes symbolic tensors and attributes by those names and gives the result, or a tuple of them.
        creates: The op makes a tensor out of no tensor; its function takes the trace as first argument.
    """

    names: tuple[str, ...]
    family: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    creates: bool

    @property
    def summary(self) -> str:
        """First line of the definition's documentation."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]


_NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}  # JSON has no word for them
_REGISTRY: dict[str, OpDefinition] = {}


def op(*names: str) -> Callable[[F], F]:
    """Registers a function as the definition of the ATen ops `names`."""

    def register(function: F) -> F:
        parameters = []
        creates = False
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name == "trace":
                creates = True
                continue
            annotation = str(parameter.annotation)
            kind = next((kind for kind in Kind if kind.value == annotation), Kind.ATTRIBUTE)
            parameters.append(Parameter(parameter.name, kind, parameter.default))
        family = function.__module__.rpartition(".")[2]
        entry = OpDefinition(names, family, tuple(parameters), function, creates)
        for name in names:
            _REGISTRY[name] = entry
        return function

    return register


def definition(name: str) -> OpDefinition | None:
    """The definition of an ATen op, or None where the registry has none."""
    return _REGISTRY.get(name)


def canonical(op_type: str) -> str:
    """The registry's name of an op as pytorch-ir spells it."""
    return "getitem" if "getitem" in op_type else op_type


def get_supported_ops() -> tuple[str, ...]:
    """The ATen names of all ops the compiler knows, sorted. Whether a node lowers also depends on its attributes."""
    return tuple(sorted(_REGISTRY))


def bind(
    node: str, name: str, tensors: Sequence[str], attrs: dict[str, Any]
) -> tuple[dict[str, str | tuple[str, ...]], dict[str, Any]]:
    """Binds a node's tensors and attributes to the parameters of its op.

    pytorch-ir lists the tensors that were given, in order, without names; an optional tensor that was None leaves no
    trace unless the extraction recorded it as a None attribute.

    Args:
        node: Name of the node, for messages.
        name: ATen name of its op.
        tensors: Names of its tensors.
        attrs: Its attributes by ATen name.

    Returns:
        Tensors by parameter name, and attributes by parameter name.

    Raises:
        UnsupportedOpError: The registry lacks the op, or the op takes no such attribute.
        IRError: The tensors cannot be bound without guessing.
    """
    entry = _REGISTRY.get(name)
    if entry is None:
        raise UnsupportedOpError(node, name, "no definition of this op is registered")
    attrs = {key: _NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in attrs.items()}
    sizes = attrs.pop("_tensor_list_sizes", [])
    if not isinstance(sizes, list) or any(type(size) is not int or size < 0 for size in sizes):
        raise IRError(f"node '{node}' ({name}): given {sizes!r:.60} as '_tensor_list_sizes', expected a list of counts")
    sizes = list(sizes)
    if attrs.pop("_tensor_list_none_masks", None):
        raise UnsupportedOpError(node, name, "a list of tensors with None in it is not supported")
    expected = _tensor_parameters(node, entry, attrs, len(tensors), sizes)
    inputs: dict[str, str | tuple[str, ...]] = {}
    rest = list(tensors)
    for parameter in expected:
        count = (sizes.pop(0) if sizes else len(rest)) if parameter.kind is Kind.TENSORS else 1
        if count > len(rest):
            raise IRError(f"node '{node}' ({name}): given {len(tensors)} tensors, none is left for '{parameter.name}'")
        inputs[parameter.name] = tuple(rest[:count]) if parameter.kind is Kind.TENSORS else rest[0]
        del rest[:count]
    if rest:
        raise IRError(f"node '{node}' ({name}): given {len(tensors)} tensors, {len(rest)} more than its schema takes")
    return inputs, _bind_attributes(node, entry, name, inputs, attrs)


def _tensor_parameters(
    node: str, entry: OpDefinition, attrs: Mapping[str, Any], given: int, sizes: Sequence[int]
) -> list[Parameter]:
    """The parameters that the given tensors belong to, in order; refuses where several choices fit."""
    candidates = [p for p in entry.parameters if p.kind is not Kind.ATTRIBUTE and p.name not in attrs]
    if any(p.kind is Kind.TENSORS for p in candidates):
        return candidates
    surplus = len(candidates) - given
    if surplus <= 0:
        return candidates
    optional = [p for p in candidates if p.kind is Kind.OPTIONAL or not p.is_required]
    if len(optional) == surplus:
        return [p for p in candidates if p not in optional]
    if len(optional) < surplus:
        needed = ", ".join(p.name for p in candidates if p not in optional)
        raise IRError(f"node '{node}' ({entry.names[0]}): given {given} tensors, its schema needs {needed}")
    names = ", ".join(p.name for p in optional)
    raise IRError(
        f"node '{node}' ({entry.names[0]}): given {given} tensors, and it is ambiguous which of {names} are absent; "
        "extract the model with npu_compiler.extract, which records them"
    )


def _bind_attributes(
    node: str, entry: OpDefinition, name: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any]
) -> dict[str, Any]:
    known = {p.name: p for p in entry.parameters}
    for key in attrs:
        if key not in known:
            raise UnsupportedOpError(node, name, f"the attribute '{key}' ({attrs[key]!r:.40}) is not supported")
        if not known[key].takes_attribute(attrs[key]):
            raise IRError(
                f"node '{node}' ({name}): given {attrs[key]!r:.40} as '{key}', expected a tensor; extract again"
            )
    for parameter in entry.parameters:
        if parameter.is_required and parameter.name not in inputs and parameter.name not in attrs:
            raise IRError(
                f"node '{node}' ({name}): its argument '{parameter.name}' is missing; extract the model again"
            )
    return dict(attrs)
