"""Sums over the records of models."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Missing", "Sums", "missing", "refusals_text", "sums", "sums_text"]

_SILENT = 0.99
_EXAMPLES = 4
_PARTICULAR = re.compile(r"'[^']*'|\d+")


class Missing(NamedTuple):
    """An op that some models leave on the CPU, for one reason."""

    op: str
    reason: str
    models: tuple[str, ...]
    nodes: int


class Sums(NamedTuple):
    """Over models: how many were built, and what became of them."""

    models: int
    refused: int
    errors: int
    whole: int
    nodes: int
    nodes_on_device: int
    ran: int
    wrong: int


def tried(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that could be built; the others say nothing of this project."""
    early = ("absent", "built")
    return [record for record in records if record["status"] not in early or "extract" in record["seconds"]]


def sums(records: Sequence[Mapping[str, Any]]) -> Sums:
    found = tried(records)
    divided = [record for record in found if "nodes_on_device" in record]
    ran = [record for record in found if "r" in record]
    return Sums(
        models=len(found),
        refused=sum(is_refused(record) for record in found),
        errors=sum("error" in record and not is_refused(record) for record in found),
        whole=sum(record["nodes_on_device"] == record["nodes"] for record in divided),
        nodes=sum(record["nodes"] for record in divided),
        nodes_on_device=sum(record["nodes_on_device"] for record in divided),
        ran=len(ran),
        wrong=sum(is_wrong(record) for record in ran),
    )


def is_refused(record: Mapping[str, Any]) -> bool:
    """Whether extraction said that the model cannot be a program, and why."""
    return bool(record.get("error", {}).get("type") == "ExtractionError")


def is_wrong(record: Mapping[str, Any]) -> bool:
    """Whether outputs are off by more than the data type costs, and PyTorch's own export of the model.

    Where a model makes much of roundings, another order of operations errs as much again, in the sum of squares.
    """
    explained = 2 * (1 - record.get("r_of_half", 1.0)) + (1 - record.get("r_of_export", 1.0)) + 0.01
    return bool(record["r"] < min(_SILENT, 1 - explained) or record["mismatched"] > record.get("mismatched_of_half", 0))


def missing(records: Sequence[Mapping[str, Any]]) -> list[Missing]:
    """What is left on the CPU, what most models lack first. Reasons are one but for names and numbers."""
    reasons: dict[tuple[str, str], str] = {}
    models: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    nodes: dict[tuple[str, str], int] = defaultdict(int)
    for record in records:
        for left in record.get("left", ()):
            key = (left["op"], _PARTICULAR.sub("", left["reason"]))
            reasons.setdefault(key, left["reason"])
            models[key][record["name"]] = None
            nodes[key] += left["nodes"]
    found = [Missing(key[0], reasons[key], tuple(names), nodes[key]) for key, names in models.items()]
    return sorted(found, key=lambda each: (-len(each.models), -each.nodes, each.op, each.reason))


def refusals_text(records: Sequence[Mapping[str, Any]]) -> str:
    """What is left on the CPU and which errors there were, as lines."""
    lines = ["models  nodes  op: reason (for example)"]
    for each in missing(records):
        examples = ", ".join(each.models[:_EXAMPLES])
        lines.append(f"{len(each.models):6} {each.nodes:6}  {each.op}: {each.reason} ({examples})")
    lines += ["errors:"]
    for record in records:
        if isinstance(record.get("error"), Mapping):
            error = record["error"]
            lines.append(f"  {record['name']} after {record['status']}: {error['type']}: {error['message']}")
    return "\n".join(lines)


def sums_text(records: Sequence[Mapping[str, Any]]) -> str:
    found = sums(records)
    whole = f"{found.whole} wholly on the device ({_percent(found.whole, found.models)})"
    nodes = f"{found.nodes_on_device} of {found.nodes} nodes ({_percent(found.nodes_on_device, found.nodes)})"
    ended = f"{found.refused} refused, {found.errors} errors; {found.ran} ran, {found.wrong} of them wrong"
    return f"{len(records)} models in the catalogue, {found.models} built; {whole}; {nodes}; {ended}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
