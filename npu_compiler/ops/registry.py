"""The op registry: every ATen op, once, with the parameters of its schema.

An op's definition is a function of symbolic tensors. Its parameters are named as in the ATen schema, so that the reader
binds tensors and attributes by name. Annotations say what a parameter may be: ``Tensor``, ``Tensor | None``,
``Tensor | Number``, ``Sequence[Tensor]``, or anything else for an attribute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.ops.binding import Evidence, Kind, Parameter, bind_tensors

__all__ = [
    "BoundNode",
    "OpDefinition",
    "bind",
    "canonical",
    "definition",
    "get_supported_ops",
    "is_in_place",
    "kind_of",
]
__all__ += ["op"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """An op: the ATen names it goes by, its parameters, and the function that defines it.

    Attributes:
        names: ATen names with overload; in-place variants are the same op.
        kind: What it is, however it is spelled; passes ask for this, never for a name. The plain ATen name of the most
            usual spelling, whose parameters all others share as far as passes look at them.
        family: Module it is defined in, for documentation.
        parameters: In the order of the ATen schema.
        function: Takes symbolic tensors and attributes by those names and gives the result, or a tuple of them.
        creates: The op makes a tensor out of no tensor; its function takes the trace as first argument.
    """

    names: tuple[str, ...]
    kind: str
    family: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    creates: bool

    @property
    def summary(self) -> str:
        """First line of the definition's documentation."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]


@dataclass(frozen=True, slots=True)
class BoundNode:
    """A node's arguments.

    Attributes:
        inputs: Tensors by parameter.
        attrs: All other arguments by parameter.
        absent, assumption: As in `Bound`.
    """

    inputs: dict[str, str | tuple[str, ...]]
    attrs: dict[str, Any]
    absent: tuple[str, ...]
    assumption: str


_NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}  # JSON has no word for them
_REGISTRY: dict[str, OpDefinition] = {}


def op(*names: str, kind: str = "") -> Callable[[F], F]:
    """Registers a function as the definition of the ATen ops `names`, of the kind of the first unless one is given."""

    def register(function: F) -> F:
        parameters = []
        creates = False
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name == "trace":
                creates = True
                continue
            annotation = str(parameter.annotation)
            binds = next((k for k in Kind if k.value == annotation), Kind.ATTRIBUTE)
            parameters.append(Parameter(parameter.name, binds, parameter.default))
        family = function.__module__.rpartition(".")[2]
        entry = OpDefinition(
            names, kind or _plain_name(names[0]).strip("_"), family, tuple(parameters), function, creates
        )
        for name in names:
            _REGISTRY[name] = entry
        return function

    return register


def definition(name: str) -> OpDefinition | None:
    """The definition of an ATen op, or None where the registry has none."""
    return _REGISTRY.get(name)


def kind_of(name: str) -> str:
    """What an op is, by its definition; of an op that has none, its plain name."""
    entry = _REGISTRY.get(name)
    return _plain_name(name).strip("_") if entry is None else entry.kind


def is_in_place(name: str) -> bool:
    """ATen's convention: the name before the overload ends in one underscore."""
    base = _plain_name(name)
    return base.endswith("_") and not base.endswith("__")


def _plain_name(name: str) -> str:
    """Without namespace and overload."""
    return name.split(".")[1] if name.count(".") > 1 else name


def canonical(op_type: str) -> str:
    """The registry's name of an op as pytorch-ir spells it."""
    return "getitem" if "getitem" in op_type else op_type


def get_supported_ops() -> tuple[str, ...]:
    """The ATen names of all ops the compiler knows, sorted. Whether a node lowers also depends on its attributes."""
    return tuple(sorted(_REGISTRY))


def bind(
    node: str, name: str, tensors: Sequence[str], attrs: Mapping[str, Any], evidence: Evidence | None = None
) -> BoundNode:
    """Binds a node's tensors and attributes to the parameters of its op.

    Args:
        node: Name of the node, for messages.
        name: ATen name of its op.
        tensors: Names of its tensors.
        attrs: Its attributes by ATen name.
        evidence: Decides which optional tensors are absent where the schema leaves a choice.

    Raises:
        UnsupportedOpError: The registry lacks the op, or the op takes no such attribute.
        IRError: The tensors cannot be bound without guessing.
    """
    entry = _REGISTRY.get(name)
    if entry is None:
        raise UnsupportedOpError(node, name, "no definition of this op is registered")
    attrs = {key: _NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in attrs.items()}
    bound = bind_tensors(f"node '{node}' ({name})", entry.parameters, len(tensors), attrs, evidence)
    inputs: dict[str, str | tuple[str, ...]] = {}
    for parameter, place in bound.tensors.items():
        if isinstance(place, int):
            inputs[parameter] = tensors[place]
        elif None in place:
            raise UnsupportedOpError(node, name, "a list of tensors with None in it is not supported")
        else:
            inputs[parameter] = tuple(tensors[i] for i in place if i is not None)
    _check_attributes(node, entry, name, inputs, attrs)
    return BoundNode(inputs, attrs, bound.absent, bound.assumption)


def _check_attributes(
    node: str, entry: OpDefinition, name: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any]
) -> None:
    known = {p.name: p for p in entry.parameters}
    for key in attrs:
        if key not in known:
            raise UnsupportedOpError(node, name, f"the attribute '{key}' ({attrs[key]!r:.40}) is not supported")
        if not known[key].takes_attribute(attrs[key]):
            raise IRError(
                f"node '{node}' ({name}): given {attrs[key]!r:.40} as '{key}', expected a tensor; extract again"
            )
    for parameter in entry.parameters:
        if not parameter.may_be_absent and parameter.name not in inputs and parameter.name not in attrs:
            raise IRError(
                f"node '{node}' ({name}): its argument '{parameter.name}' is missing; extract the model again"
            )
