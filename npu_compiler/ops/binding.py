"""Binds the tensors of a node, which an IR lists in order and without names, to the parameters of its op's schema.

An argument that was None leaves no trace in pytorch-ir's lists. Where that leaves several ways to bind the tensors, the
evidence decides, in this order: what the model calls them (``running_mean``), whether their shapes fit, and their order
(torch.export leaves out trailing defaults only, so that the earlier arguments are the likelier ones to be given). What
was assumed is said; evidence that contradicts itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter as _Parameter
from itertools import combinations
from typing import Any

from npu_compiler.errors import IRError

__all__ = ["Bound", "Evidence", "Kind", "Parameter", "bind_tensors"]

MISSING = _Parameter.empty

TensorArgument = int | tuple[int | None, ...]
"""Positions in the node's list of tensors: one, or those of a list in which None may stand."""


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
    default: Any = MISSING

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def may_be_absent(self) -> bool:
        return self.kind is Kind.OPTIONAL or not self.is_required

    def takes_attribute(self, value: object) -> bool:
        """Whether it may be an attribute: anything but a tensor's parameter, and None for an optional tensor."""
        return self.kind in (Kind.ATTRIBUTE, Kind.TENSOR_OR_NUMBER) or (self.kind is Kind.OPTIONAL and value is None)


@dataclass(frozen=True)
class Evidence:
    """What is known of a node's tensors beyond their order.

    Attributes:
        called: What the model calls each tensor; none for the result of another node.
        fits: Whether the op takes them so, and gives what the IR declares; asked only where there is a choice.
    """

    called: Sequence[Sequence[str]]
    fits: Callable[[Mapping[str, TensorArgument]], bool]


@dataclass(frozen=True)
class Bound:
    """Tensors by parameter.

    Attributes:
        tensors: Positions in the node's list, by the parameter's name.
        absent: Parameters that were taken for None; empty where the schema left no choice.
        assumption: Why, in words; empty where the schema left no choice.
    """

    tensors: Mapping[str, TensorArgument]
    absent: tuple[str, ...] = ()
    assumption: str = ""


def bind_tensors(
    where: str, parameters: Sequence[Parameter], count: int, attrs: dict[str, Any], evidence: Evidence | None = None
) -> Bound:
    """Binds `count` tensors.

    Args:
        where: Node and op, for messages.
        parameters: All parameters of the op, in the order of its schema.
        count: How many tensors the node lists.
        attrs: The node's attributes; those that describe its list of tensors are taken out.
        evidence: Decides where the schema leaves a choice; without it such a node is refused.

    Raises:
        IRError: Too many or too few tensors, or evidence that contradicts itself.
    """
    keywords = _taken_out(attrs, "_tensor_keywords", str, where)
    sizes = _taken_out(attrs, "_tensor_list_sizes", int, where)
    masks = _taken_out(attrs, "_tensor_list_none_masks", list, where)
    unknown = set(keywords) - {p.name for p in parameters if p.kind is not Kind.ATTRIBUTE}
    if unknown or len(keywords) > count:
        raise IRError(f"{where}: given tensors by the keywords {', '.join(keywords)}, which it has not; {_REMEDY}")
    takers = [p for p in parameters if p.kind is not Kind.ATTRIBUTE and p.name not in attrs and p.name not in keywords]
    ordered = count - len(keywords)
    lists = [p for p in takers if p.kind is Kind.TENSORS]
    singles = [p for p in takers if p.kind is not Kind.TENSORS]
    of_list = dict(zip((p.name for p in lists), _sizes(where, len(lists), ordered - len(singles), sizes), strict=True))
    surplus = len(singles) - (ordered - sum(of_list.values()))
    if surplus < 0:
        raise IRError(f"{where}: given {count} tensors, {-surplus} more than its schema takes; {_REMEDY}")
    optional = [p for p in singles if p.may_be_absent]
    if len(optional) < surplus:
        needed = ", ".join(p.name for p in takers if p not in optional)
        raise IRError(f"{where}: given {count} tensors, its schema needs {needed}; {_REMEDY}")
    by_keyword: dict[str, TensorArgument] = {name: ordered + i for i, name in enumerate(keywords)}
    ways = [
        _placed([p for p in takers if p not in absent], of_list, masks) | by_keyword
        for absent in reversed([*combinations(optional, surplus)])  # the first: all that is given comes first
    ]
    if len(ways) == 1:
        return Bound(ways[0])
    names = [p.name for p in optional]
    if evidence is None:
        raise IRError(f"{where}: {surplus} of {', '.join(names)} are absent, and it is not recorded which; {_REMEDY}")
    chosen, reason = _choose(where, ways, names, evidence)
    absent = tuple(name for name in names if name not in chosen)
    given = ", ".join(name for name in names if name in chosen)
    return Bound(chosen, absent, f"{where}: {', '.join(absent)} taken for absent and {given} for given, {reason}")


_REMEDY = "extract the model with npu_compiler.extract, which records all that the schema needs"


def _taken_out(attrs: dict[str, Any], key: str, kind: type, where: str) -> list[Any]:
    value = attrs.pop(key, None)
    if not value:
        return []
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise IRError(f"{where}: given {value!r:.60} as '{key}', expected a list that pytorch-ir made; {_REMEDY}")
    return value


def _sizes(where: str, lists: int, spare: int, recorded: list[int]) -> list[int]:
    """How many tensors each list takes: as recorded; else a single list takes all that is spare."""
    if len(recorded) == lists and min(recorded, default=0) >= 0:
        return recorded
    if lists == 1 and not recorded:
        return [max(0, spare)]
    raise IRError(f"{where}: it has {lists} lists of tensors and the sizes of {len(recorded)} are recorded; {_REMEDY}")


def _placed(
    present: Sequence[Parameter], sizes: Mapping[str, int], masks: Sequence[Sequence[bool]]
) -> dict[str, TensorArgument]:
    placed: dict[str, TensorArgument] = {}
    rest = iter(masks)
    start = 0
    for parameter in present:
        size = sizes.get(parameter.name)
        if size is None:
            placed[parameter.name], start = start, start + 1
            continue
        placed[parameter.name] = tuple(_with_none(range(start, start + size), next(rest, [False] * size)))
        start += size
    return placed


def _with_none(items: Sequence[int], mask: Sequence[bool]) -> Iterator[int | None]:
    """Puts None back where a list of optional tensors had it."""
    if sum(not absent for absent in mask) != len(items):
        raise IRError(f"given {mask!r:.60} as '_tensor_list_none_masks' of {len(items)} tensors; {_REMEDY}")
    rest = iter(items)
    yield from (None if absent else next(rest) for absent in mask)


def _choose(
    where: str, ways: Sequence[Mapping[str, TensorArgument]], names: Sequence[str], evidence: Evidence
) -> tuple[Mapping[str, TensorArgument], str]:
    """Of several ways to bind the tensors, the one that the evidence supports, and that evidence in words."""
    told = dict(_told(ways, names, evidence.called))
    words = ", ".join(f"'{word}'" for word, _ in told.values())
    by_name = [way for way in ways if all(way.get(name) == position for position, (_, name) in told.items())]
    fitting = [way for way in ways if evidence.fits(way)]
    agreed = [way for way in by_name if way in fitting] if fitting else by_name
    if not agreed:
        against = "the order of the arguments" if not by_name else "their shapes, or its attributes"
        raise IRError(
            f"{where}: the names of its tensors ({words}) contradict {against}, so that it cannot be told which of "
            f"{', '.join(names)} are absent; {_REMEDY}"
        )
    if told and len(by_name) == 1:
        return agreed[0], f"by the name{'s' if len(told) > 1 else ''} {words}"
    if len(agreed) == 1:
        return agreed[0], "as nothing else fits its shapes and attributes"
    return agreed[0], f"by their order alone; if that is wrong, {_REMEDY}"


def _told(
    ways: Sequence[Mapping[str, TensorArgument]], names: Sequence[str], called: Sequence[Sequence[str]]
) -> Iterator[tuple[int, tuple[str, str]]]:
    """For tensors that could be several parameters and whose name has one's: position, word of the name, parameter."""
    for position, words in enumerate(called):
        possible = {name for way in ways for name, place in way.items() if place == position}
        if len(possible) < 2:
            continue
        fits = [(len(name), word, name) for word in words for name in names if _ends_in(word, name)]
        if fits:
            _, word, name = max(fits, key=lambda fit: fit[0])
            yield position, (word, name)


def _ends_in(word: str, name: str) -> bool:
    return word == name or word.endswith((f"_{name}", f".{name}"))
