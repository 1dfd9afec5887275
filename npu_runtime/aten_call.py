"""Calls PyTorch operators by the arguments that an IR records, bound by the operator's own schema.

An IR lists a node's tensors in order and without names, and leaves out what was at its default. Reading them in the
order of the schema loses keyword arguments behind a defaulted one, and takes the next tensor for one that was None. So
they are bound as the compiler binds those of ops that it lowers (`npu_compiler.ops.binding`), by PyTorch's own schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.ops.binding import Evidence, Kind, Parameter, TensorArgument, bind_tensors

__all__ = ["AtenCall", "BoundCall"]

_KINDS = {
    "Tensor": Kind.TENSOR,
    "Optional[Tensor]": Kind.OPTIONAL,
    **dict.fromkeys(("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"), Kind.TENSORS),
}
_NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the tensor of this number among a node's."""

    index: int


class BoundCall:
    """An operator that only waits for its tensors."""

    def __init__(
        self,
        overload: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        copied: Sequence[int],
    ) -> None:
        """Args:
        overload: The operator.
        args, kwargs: Its arguments, with `_Place`s where tensors go.
        copied: Numbers of tensors that it writes and that must stay as they are: it gets copies.
        """
        self._overload, self._args, self._kwargs, self._copied = overload, list(args), dict(kwargs), copied
        self._tensors = [(place, arg.index) for place, arg in enumerate(args) if isinstance(arg, _Place)]
        self._lists = [(place, arg) for place, arg in enumerate(args) if _has_places(arg)]
        self._named = [(name, arg) for name, arg in kwargs.items() if isinstance(arg, _Place) or _has_places(arg)]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the operator on a node's tensors, in order; gives the tensors among its results."""
        if self._copied:
            tensors = [tensor.clone() if i in self._copied else tensor for i, tensor in enumerate(tensors)]
        args, kwargs = self._args.copy(), self._kwargs
        for place, index in self._tensors:
            args[place] = tensors[index]
        for place, listed in self._lists:
            args[place] = _filled(listed, tensors)
        if self._named:
            kwargs = kwargs | {name: _filled(value, tensors) for name, value in self._named}
        result = self._overload(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return [result]
        results = result if isinstance(result, tuple | list) else (result,)
        return [item for item in results if isinstance(item, torch.Tensor)]


def _has_places(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, _Place) for item in value)


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    return [_filled(item, tensors) for item in value] if isinstance(value, list) else value


class AtenCall:
    """An operator, found by its name."""

    def __init__(self, node: str, op: str) -> None:
        """Finds the operator.

        Args:
            node: Name of the node, for messages.
            op: Name with namespace and overload, such as ``aten.add.Tensor``.

        Raises:
            UnsupportedOpError: PyTorch has no such operator here.
        """
        self.node, self.op = node, op
        namespace, _, rest = op.partition(".")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace, None), name, None) if name else None
        found = getattr(packet, overload or "default", None)
        if not isinstance(found, torch._ops.OpOverload):
            reason = "PyTorch has no operator of this name; import the package that defines it"
            if op.startswith("wrap_"):
                reason = "it hides a graph that the IR does not hold; npu_compiler.extract opens such nodes"
            raise UnsupportedOpError(node, op, reason)
        self._overload = found
        self._arguments = found._schema.arguments
        self._parameters = [_parameter(argument) for argument in self._arguments]
        self._where = f"node '{node}' ({op})"

    def bound(self, attrs: Mapping[str, Any], count: int) -> BoundCall:
        """The operator with all but its tensors bound, once for all calls. What it changes in place is a copy.

        Args:
            attrs: The node's attributes, as `settled` gives them.
            count: How many tensors the node has.

        Raises:
            IRError: As `bind`.
        """
        args, kwargs = self.bind([_Place(index) for index in range(count)], attrs)
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in self._arguments]
        copied = [
            value.index
            for value, is_written in zip(args, written, strict=False)
            if is_written and isinstance(value, _Place)
        ]
        return BoundCall(self._overload, args, kwargs, copied)

    def bind(
        self, tensors: Sequence[Any], attrs: Mapping[str, Any], evidence: Evidence | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments.

        Args:
            tensors: The node's tensors, or anything that stands for them, in order.
            attrs: The node's attributes.
            evidence: Decides which optional tensors are absent where the schema leaves a choice.

        Raises:
            IRError: An argument is missing, one is too many, or several bindings are possible.
        """
        attrs = dict(attrs)
        places = bind_tensors(self._where, self._parameters, len(tensors), attrs, evidence).tensors
        return self._ordered(tensors, places, attrs)

    def settled(self, node: Mapping[str, Any], names: Sequence[Sequence[str]]) -> tuple[dict[str, Any], str]:
        """A node's attributes with None for tensors that are absent where the IR leaves a choice; and what was assumed.

        Args:
            node: The node, as the IR has it.
            names: What the model calls each tensor that it reads.

        Raises:
            IRError: As `bind`.
        """
        attrs = dict(node["attrs"])
        evidence = Evidence(names, lambda places: self._computes(node, places))
        bound = bind_tensors(self._where, self._parameters, len(node["inputs"]), attrs, evidence)
        self._ordered(node["inputs"], bound.tensors, attrs)
        return {**node["attrs"], **dict.fromkeys(bound.absent)}, bound.assumption

    def _computes(self, node: Mapping[str, Any], places: Mapping[str, TensorArgument]) -> bool:
        """Whether the operator takes tensors of such shapes so, and gives what the IR declares."""
        tensors = [_without_memory(spec) for spec in node["inputs"]]
        attrs = {key: value for key, value in node["attrs"].items() if not key.startswith("_tensor_")}
        try:
            args, kwargs = self._ordered(tensors, places, attrs, "meta")
            result = self._overload(*args, **kwargs)
        except (IRError, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return False
        results = result if isinstance(result, (tuple, list)) else (result,)
        shapes = [list(item.shape) for item in results if isinstance(item, torch.Tensor)]
        return shapes == [list(spec["shape"]) for spec in node["outputs"]]

    def _ordered(
        self,
        tensors: Sequence[Any],
        places: Mapping[str, TensorArgument],
        attrs: Mapping[str, Any],
        device: str = "cpu",
    ) -> tuple[list[Any], dict[str, Any]]:
        given: dict[str, Any] = {
            name: tensors[place] if isinstance(place, int) else [None if i is None else tensors[i] for i in place]
            for name, place in places.items()
        }
        known = {argument.name for argument in self._arguments}
        for name, value in attrs.items():
            if name not in known:
                raise self._error(f"its schema has no argument '{name}'")
            given.setdefault(name, value)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self._arguments:
            if argument.name in given:
                value = _converted(given[argument.name], str(argument.real_type), device)
            elif argument.has_default_value():
                value = argument.default_value
            elif str(argument.type).startswith("Optional"):
                value = None
            else:
                raise self._error(f"its argument '{argument.name}' is missing")
            if not argument.kwarg_only:
                args.append(value)
            elif argument.name in given:
                kwargs[argument.name] = value
        return args, kwargs

    def _error(self, reason: str) -> IRError:
        return IRError(
            f"{self._where}: {reason}; extract the model with npu_compiler.extract, which records all "
            "that the schema needs"
        )


def _parameter(argument: Any) -> Parameter:
    kind = _KINDS.get(str(argument.type), Kind.ATTRIBUTE)
    required = kind is not Kind.OPTIONAL and not argument.has_default_value()
    return Parameter(argument.name, kind) if required else Parameter(argument.name, kind, None)


def _without_memory(spec: Mapping[str, Any]) -> torch.Tensor:
    return torch.empty(tuple(spec["shape"]), dtype=getattr(torch, spec["dtype"]), device="meta")


def _converted(value: Any, kind: str, device: str) -> Any:
    """An attribute as torch takes it; JSON has dtypes, layouts, devices and memory formats by name."""
    if not isinstance(value, str):
        return value
    if "Device" in kind:
        return torch.device(device)  # whatever device the model was extracted on, this node runs here
    if any(name in kind for name in ("ScalarType", "Layout", "MemoryFormat")):
        return getattr(torch, value.removeprefix("torch."))
    return _NON_FINITE.get(value, value)
