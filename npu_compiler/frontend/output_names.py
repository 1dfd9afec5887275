"""Reads off an exported program how the module nests what it returns."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from itertools import count
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils._pytree import TreeSpec

from npu_compiler.artifact.output_structure import Structure
from npu_compiler.errors import ExtractionError

__all__ = ["output_structure"]


def output_structure(exported: ExportedProgram, model: str) -> Structure:
    """The structure of what the module returns, as `npu_compiler.artifact.output_structure` writes it.

    Raises:
        ExtractionError: The module returns no tensor, or a constant that is neither a number nor text nor None.
    """
    numbers = count()
    leaves: list[Structure] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            continue
        if not isinstance(spec.arg, ConstantArgument):
            leaves.append(next(numbers))
        elif isinstance(spec.arg.value, bool | int | float | str | None):
            leaves.append({"constant": spec.arg.value})
        else:
            raise ExtractionError(
                f"'{model}' returns a {type(spec.arg.value).__name__}, expected tensors, numbers, text and None, in "
                "tuples, lists, dicts and classes that torch.export knows; return its parts"
            )
    out_spec = exported.call_spec.out_spec
    assert out_spec is not None  # torch.export always records one
    return _nested(out_spec, iter(leaves))


def _nested(spec: TreeSpec, leaves: Iterator[Structure]) -> Structure:
    if spec.is_leaf():
        return next(leaves)
    items = [_nested(child, leaves) for child in spec.children()]
    if spec.type is list:
        return {"list": items}
    keys = _keys(spec, len(items))
    if keys is None:
        return {"tuple": items}
    kind = "dict" if spec.type in (dict, OrderedDict, defaultdict) else "fields"
    if spec.type is namedtuple or isinstance(spec.context, type):
        kind = "namedtuple"
    return {kind: [[key, item] for key, item in zip(keys, items, strict=True)]}


def _keys(spec: TreeSpec, size: int) -> list[Any] | None:
    """The keys or field names of a node; None where its members go by their place.

    What a class records is its own: the names, or names and those of the members that are None (torch's dataclasses).
    """
    context = spec.context
    if isinstance(context, type):
        context = getattr(context, "_fields", None)
    if spec.type is defaultdict:
        context = context[1]
    if isinstance(context, list | tuple) and context and isinstance(context[0], list | tuple) and spec.type is not dict:
        context = context[0]
    if not isinstance(context, list | tuple) or len(context) != size:
        return None
    if spec.type in (dict, OrderedDict, defaultdict):
        return [key if isinstance(key, bool | int | float | str) else str(key) for key in context]
    return list(context) if all(isinstance(name, str) for name in context) else None
