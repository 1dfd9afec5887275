"""The file of results: one record for each model, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_records", "write_records"]


def read_records(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What the file says of the run, and its records by name; both empty where there is none."""
    if not path.exists():
        return {}, {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["run"], {record["name"]: record for record in content["models"]}


def write_records(path: Path, run: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> None:
    content = {"run": run, "models": [records[name] for name in sorted(records)]}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
