"""Calls PyTorch operators by the arguments that an IR records, bound by the operator's own schema.

An IR lists a node's tensors in order and without names, and leaves out what was at its default. Reading them in the
order of the schema loses keyword arguments behind a defaulted one, and takes the next tensor for one that was None. So
the tensors are bound to the parameters that have no recorded value, and where more parameters than tensors are left, to
those that cannot be absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from npu_compiler.errors import IRError, UnsupportedOpError

__all__ = ["AtenCall"]

_MEMORY_TYPES = ("Tensor", "Optional[Tensor]")
_LIST_TYPES = ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]")
_NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class AtenCall:
    """An operator, ready to be called."""

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
            raise UnsupportedOpError(
                node, op, "PyTorch has no operator of this name; import the package that defines it"
            )
        self._overload = found
        self._arguments = found._schema.arguments

    def __call__(self, tensors: Sequence[torch.Tensor], attrs: Mapping[str, Any], in_place: bool) -> list[torch.Tensor]:
        """Runs the operator.

        Args:
            tensors: The node's tensors, in order.
            attrs: The node's attributes.
            in_place: Whether an in-place operator may change its tensor; otherwise it changes a copy.

        Returns:
            The tensors among its results.
        """
        args, kwargs = self.bind(tensors, attrs)
        if not in_place:
            args = [self._own(argument, value) for argument, value in zip(self._arguments, args, strict=False)]
        result = self._overload(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        return [item for item in results if isinstance(item, torch.Tensor)]

    @staticmethod
    def _own(argument: Any, value: Any) -> Any:
        written = argument.alias_info is not None and argument.alias_info.is_write
        return value.clone() if written and isinstance(value, torch.Tensor) else value

    def bind(self, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments.

        Args:
            tensors: The node's tensors, or anything that stands for them, in order.
            attrs: The node's attributes.

        Raises:
            IRError: An argument is missing, one is too many, or several bindings are possible.
        """
        given = self._bind_tensors(tensors, attrs)
        known = {argument.name for argument in self._arguments}
        for name, value in attrs.items():
            if name.startswith("_tensor_list_"):
                continue
            if name not in known:
                raise self._error(f"its schema has no argument '{name}'")
            given.setdefault(name, value)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self._arguments:
            if argument.name in given:
                value = _converted(given[argument.name], str(argument.real_type))
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

    def _bind_tensors(self, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        takers = [
            argument
            for argument in self._arguments
            if str(argument.type) in _MEMORY_TYPES + _LIST_TYPES and argument.name not in attrs
        ]
        lists = [argument for argument in takers if str(argument.type) in _LIST_TYPES]
        sizes = self._list_sizes(lists, len(tensors) - (len(takers) - len(lists)), attrs)
        present = self._present(takers, len(tensors) - sum(sizes.values()), lists)
        rest = iter(tensors)
        masks = iter(attrs.get("_tensor_list_none_masks") or ())
        given: dict[str, Any] = {}
        for argument in present:
            if argument.name not in sizes:
                given[argument.name] = next(rest)
            else:
                items = [next(rest) for _ in range(sizes[argument.name])]
                given[argument.name] = _with_none(items, argument, masks)
        if next(rest, None) is not None:
            raise self._error(f"given {len(tensors)} tensors, more than its schema takes")
        return given

    def _list_sizes(self, lists: Sequence[Any], spare: int, attrs: Mapping[str, Any]) -> dict[str, int]:
        """How many tensors each list takes: as recorded; else a single list takes all that is spare."""
        recorded = list(attrs.get("_tensor_list_sizes") or ())
        if len(recorded) == len(lists):
            return {argument.name: size for argument, size in zip(lists, recorded, strict=True)}
        if len(lists) == 1 and not recorded:
            return {lists[0].name: max(0, spare)}
        raise self._error(f"it has {len(lists)} lists of tensors and the sizes of {len(recorded)} are recorded")

    def _present(self, takers: Sequence[Any], single: int, lists: Sequence[Any]) -> Sequence[Any]:
        """The parameters that are given, where `single` tensors are left for those that are no lists."""
        surplus = len(takers) - len(lists) - single
        if surplus <= 0:
            return takers
        optional = [argument for argument in takers if str(argument.type) == "Optional[Tensor]"]
        if len(optional) == surplus:
            return [argument for argument in takers if argument not in optional]
        names = ", ".join(argument.name for argument in optional)
        if len(optional) < surplus:
            raise self._error(f"{single} tensors are too few for its schema")
        raise self._error(f"{surplus} of {names} are absent, and it is not recorded which")

    def _error(self, reason: str) -> IRError:
        return IRError(
            f"node '{self.node}' ({self.op}): {reason}; extract the model with npu_compiler.extract, which records all "
            "that the schema needs"
        )


def _with_none(items: list[Any], argument: Any, masks: Any) -> list[Any]:
    """Puts None back where a list of optional tensors had it; `masks` holds a list for each that had any."""
    if "Optional[Tensor]" not in str(argument.type):
        return items
    mask = next(masks, None)
    if mask is None:
        return items
    rest = iter(items)
    return [None if absent else next(rest) for absent in mask]


def _converted(value: Any, kind: str) -> Any:
    """An attribute as torch takes it; JSON has dtypes, layouts, devices and memory formats by name."""
    if not isinstance(value, str):
        return value
    if "Device" in kind:
        return torch.device("cpu")  # whatever device the model was extracted on, this node runs here
    if any(name in kind for name in ("ScalarType", "Layout", "MemoryFormat")):
        return getattr(torch, value.removeprefix("torch."))
    return _NON_FINITE.get(value, value)
