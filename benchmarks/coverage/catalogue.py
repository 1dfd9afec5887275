"""All models that are tried, by name."""

from __future__ import annotations

from benchmarks.coverage import timm_models, torchvision_models, transformers_models
from benchmarks.coverage.entry import Entry

__all__ = ["catalogue"]


def catalogue(pattern: str = "") -> dict[str, Entry]:
    """The entries whose name contains `pattern`, which may have several parts separated by commas."""
    parts = pattern.split(",")
    sources = (torchvision_models, timm_models, transformers_models)
    entries = [entry for source in sources for entry in source.entries()]
    return {entry.name: entry for entry in entries if any(part in entry.name for part in parts)}
