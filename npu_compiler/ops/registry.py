"""The op registry: every ATen op, once, with the parameters of its schema.

An op's definition is a function of symbolic tensors. Its parameters are named as in the ATen schema, so that the reader
binds tensors and attributes by name. Annotations say what a parameter may be: ``Tensor``, ``Tensor | None``,
``Tensor | Number``, ``Sequence[Tensor]``, or anything else for an attribute. What passes may know of it stands beside
that, as traits: no name of an op is written anywhere but in `ops/` and where models come in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.ops.binding import Bound, Evidence, Kind, Parameter, bind_tensors
from npu_compiler.ops.rows import broadcasting
from npu_compiler.ops.traits import Memory, Traits, Work

__all__ = [
    "BoundNode",
    "OpDefinition",
    "bind",
    "canonical",
    "definition",
    "get_supported_ops",
    "is_in_place",
    "qualified",
    "spelled",
    "terms",
    "traits_of",
]
__all__ += ["elementwise", "op", "unlowered", "view"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """An op: the ATen names it goes by, its parameters, and the function that defines it.

    Attributes:
        names: ATen names with overload; in-place variants are the same op.
        family: Module it is defined in, for documentation.
        parameters: In the order of the ATen schema.
        function: Takes symbolic tensors and attributes by those names and gives the result, or a tuple of them.
        creates: The op makes a tensor out of no tensor; its function takes the trace as first argument.
        traits: What passes may know of it.
    """

    names: tuple[str, ...]
    family: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    creates: bool
    traits: Traits

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
_SPELLED: dict[Callable[..., Any], str] = {}  # by an op's function: the first of its names
_UNLOWERED: dict[str, Traits] = {}  # by plain name, of ops that have no definition


def op(*names: str, **traits: Any) -> Callable[[F], F]:
    """Registers a function as the definition of the ATen ops `names`, with `traits` as `Traits` names them."""

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
        entry = OpDefinition(names, family, tuple(parameters), function, creates, Traits(**traits))
        _SPELLED[function] = names[0]
        for name in names:
            if name in _REGISTRY:
                raise ValueError(f"given a definition of '{name}' in '{family}', '{_REGISTRY[name].family}' has one")
            _REGISTRY[name] = entry
        return function

    return register


elementwise = partial(op, work=Work.ELEMENTWISE, rows=broadcasting)
"""Registers an op that makes each element of the ones at its place."""

view = partial(op, work=Work.VIEW, memory=Memory.OPERAND)
"""Registers an op that gives the same elements another shape or order."""


def unlowered(*names: str, **traits: Any) -> None:
    """Says what passes may know of ops, by plain name, that have no definition and run on the CPU."""
    _UNLOWERED.update(dict.fromkeys(names, Traits(**traits)))


def definition(name: str) -> OpDefinition | None:
    """The definition of an ATen op, or None where the registry has none. An in-place form is the same op."""
    entry = _REGISTRY.get(name)
    return _REGISTRY.get(_out_of_place(name)) if entry is None and is_in_place(name) else entry


_NO_TRAITS = Traits()
_NO_ATTRIBUTES: Mapping[str, Any] = {}


def traits_of(name: str, attrs: Mapping[str, Any] = _NO_ATTRIBUTES) -> Traits:
    """What passes may know of an ATen op that has these attributes."""
    entry = definition(name)
    known = _UNLOWERED.get(_plain_name(name).strip("_"), _NO_TRAITS) if entry is None else entry.traits
    if known.unless and attrs.get(known.unless):
        return replace(known, keeps_order=False, is_silent=False)
    return known


def terms() -> tuple[str, ...]:
    """The operations of which equations are made, sorted."""
    return tuple(sorted({entry.traits.term.name for entry in _REGISTRY.values() if entry.traits.term is not None}))


def spelled(function: Callable[..., Any]) -> str:
    """The ATen name of the op that a function defines, for passes that write nodes."""
    return _SPELLED[function]


@lru_cache(maxsize=4096)
def is_in_place(name: str) -> bool:
    """ATen's convention: the name before the overload ends in one underscore; Python's: ``__iand__`` and its like."""
    base = _plain_name(name)
    return base.startswith("__i") if base.endswith("__") else base.endswith("_")


def _out_of_place(name: str) -> str:
    """The name of the op of which an in-place one is the other form."""
    namespace, base, overload = name.split(".", 2) if name.count(".") > 1 else ("", name, "")
    return ".".join(filter(None, (namespace, base.removesuffix("_"), overload)))


def _plain_name(name: str) -> str:
    """Without namespace and overload."""
    return name.split(".")[1] if name.count(".") > 1 else name


def canonical(op_type: str) -> str:
    """The registry's name of an op as pytorch-ir spells it."""
    return "getitem" if "getitem" in op_type else op_type


def qualified(name: str) -> str:
    """The registry's name of an op that is written without its namespace, which then is ATen's."""
    return name if name.count(".") > 1 else f"aten.{name}"


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
    entry = definition(name)
    if entry is None:
        raise UnsupportedOpError(node, name, traits_of(name).undefined or "no definition of this op is registered")
    attrs = {key: _NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in attrs.items()}
    known = _only_way(name, len(tensors), tuple(attrs))
    bound = known or bind_tensors(f"node '{node}' ({name})", entry.parameters, len(tensors), attrs, evidence)
    inputs: dict[str, str | tuple[str, ...]] = {}
    for parameter, place in bound.tensors.items():
        if isinstance(place, int):
            inputs[parameter] = tensors[place]
        else:
            inputs[parameter] = tuple(tensors[i] for i in place if i is not None)
            if None in place:
                attrs["_dims"] = [dim for dim, i in enumerate(place) if i is not None]
    if attrs:
        _check_attributes(node, entry, name, attrs)
    if known is None:
        _check_presence(node, entry, name, {*inputs, *attrs})
    return BoundNode(inputs, attrs, bound.absent, bound.assumption)


@lru_cache(maxsize=4096)  # a model has many nodes of an op that are alike
def _only_way(name: str, count: int, attrs: tuple[str, ...]) -> Bound | None:
    """How so many tensors are bound beside attributes of these names; None where that alone does not say it."""
    entry = definition(name)
    if entry is None or any(key.startswith("_tensor_") for key in attrs):
        return None
    try:
        bound = bind_tensors(name, entry.parameters, count, dict.fromkeys(attrs))
    except IRError:
        return None
    return None if _missing(entry, {*bound.tensors, *attrs}) else bound


def _missing(entry: OpDefinition, given: Collection[str]) -> list[str]:
    """The parameters that have to be given and are not."""
    return [p.name for p in entry.parameters if not p.may_be_absent and p.name not in given]


def _check_presence(node: str, entry: OpDefinition, name: str, given: Collection[str]) -> None:
    for parameter in _missing(entry, given):
        raise IRError(f"node '{node}' ({name}): its argument '{parameter}' is missing; extract the model again")


def _check_attributes(node: str, entry: OpDefinition, name: str, attrs: Mapping[str, Any]) -> None:
    known = {p.name: p for p in entry.parameters}
    for key in attrs:
        if key not in known:
            raise UnsupportedOpError(node, name, f"the attribute '{key}' ({attrs[key]!r:.40}) is not supported")
        if not known[key].takes_attribute(attrs[key]):
            raise IRError(
                f"node '{node}' ({name}): given {attrs[key]!r:.40} as '{key}', expected a tensor; extract again"
            )
