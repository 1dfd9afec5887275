"""Targets and devices are named by the packages that bring them, and by their entry points: no other package does."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.architecture.test_imports import ROOT, modules

ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
NAMES = {*ENTRY_POINTS["npu.targets"], *ENTRY_POINTS["npu.devices"]}
NAMED = re.compile(rf"(?<![a-z])({'|'.join(sorted(NAMES, key=len, reverse=True))})(?![a-z])", re.IGNORECASE)
PACKAGES = ("npu_compiler", "npu_runtime", "npu_model", "npu_text", "npu_cli")
GENERAL = [name for name in modules() if name.split(".")[0] in PACKAGES]

# The strings that name one nevertheless, and why.
ALLOWED = {"__cuda_array_interface__": "a protocol of other libraries' arrays"}


def named(module: str) -> Iterator[str]:
    """The strings of a module that name a target or a device; documentation apart."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node in documentation:
            continue
        if NAMED.search(node.value) and node.value not in ALLOWED:
            yield f"{module}:{node.lineno} {node.value!r}"


@pytest.mark.parametrize("module", GENERAL)
def test_no_general_package_names_a_target_or_a_device(module: str) -> None:
    assert list(named(module)) == []


def test_names_would_be_found() -> None:
    assert {"metal", "cuda", "software-metal"} <= NAMES
    assert list(named("cuda_runtime.device_kinds"))
    assert all(NAMED.search(text) for text in ("cuda:1", "on CUDA", "--target metal", "cuda_compiler.op_support"))
    assert not NAMED.search("metallic")
