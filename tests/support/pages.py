"""Pages of the documentation, and what they have to run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from npu_cli.extras import import_torchvision
from npu_cli.main import main

__all__ = ["FENCE", "fences", "run_page"]

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def fences(path: Path) -> list[tuple[str, str]]:
    """Language and text of each code fence of a page."""
    return FENCE.findall(path.read_text(encoding="utf-8"))


def run_page(path: Path) -> dict[str, Any]:
    """Runs a page's Python and its `npu` commands, in order, in the current folder; gives the names that it made."""
    import_torchvision()  # also beside a build of torch that it does not fit
    namespace: dict[str, Any] = {}
    for language, text in fences(path):
        if language == "python":
            exec(compile(text, path.name, "exec"), namespace)
        for line in text.splitlines() if language == "console" else ():
            if line.startswith("$ npu "):
                assert main(shlex.split(line)[2:]) == 0, line
    return namespace
