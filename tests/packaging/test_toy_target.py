"""A target in a folder outside the packages: found by its entry points, small, and made of public names alone.

The cases of every op run on it in `tests/ops`.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.errors import KernelCompileError
from npu_runtime import Device, Executor, Generator
from tests.ops.cases import case, floats
from tests.ops.indexed import GRAPHS, HOSTILE, Indexed
from tests.support.decoders import check_greedy, make_decoder
from tests.support.distribution import TOY_TARGET, installed, write_metadata

ROOT = Path(__file__).parents[2]
SOURCES = sorted(TOY_TARGET.glob("*.py"))
PUBLIC = {
    "npu_compiler.target_api",
    "npu_runtime.device_api",
    "npu_compiler.dtypes",
    "npu_compiler.errors",
    "npu_compiler.integers",
}
MOST_LINES = 500


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with installed(TOY_TARGET):
        yield Device("toy")


def test_it_is_small() -> None:
    files = [path for path in TOY_TARGET.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path.name for path in SOURCES] == ["toy_compiler.py", "toy_runtime.py"]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < MOST_LINES


def names_used(path: Path) -> Iterator[tuple[ModuleType, str]]:
    """Every name that a source takes of this project, with the module that it takes it from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    aliases: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("npu_") for alias in node.names), "import names, or a module as a name"
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("npu_"):
            continue
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            if whole in PUBLIC:
                aliases[alias.asname or alias.name] = importlib.import_module(whole)
            else:
                yield importlib.import_module(str(node.module)), alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_it_takes_public_names_alone(path: Path) -> None:
    used = list(names_used(path))
    assert used
    for module, name in used:
        assert module.__name__ in PUBLIC
        assert name in module.__all__, f"{module.__name__}.{name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_it_needs_numpy_and_nothing_else(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {name.split(".")[0] for name in imports} - sys.stdlib_module_names - {"npu_compiler", "npu_runtime"}
    assert foreign <= {"numpy"}


@pytest.mark.parametrize("page", ["architecture.md", "architecture.ko.md"])
def test_what_others_may_import_is_documented(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert "`npu_compiler.target_api`" in text
    assert "`npu_runtime.device_api`" in text


@pytest.mark.parametrize("name", GRAPHS)
def test_indices_are_checked(name: str, device: Device) -> None:
    """Those beyond their tensor are told, and touch nothing; states are updated in place, outputs are several."""
    graph = Indexed(name, device, torch.float16, torch.int64)
    count = int(torch.Size(graph.graph.ids).numel())
    graph.check([*range(count)][::-1])
    extent = graph.graph.extent
    for value in (*HOSTILE, extent, extent + 1, -extent, -extent - 1):
        graph.check([*range(count - 1), value])


def test_a_damaged_kernel_is_refused(device: Device) -> None:
    program = npu_compiler.compile(case("relu.default", floats(4)).ir(torch.float32), target="toy")
    (kernel,) = program.main.kernels
    plan = replace(program.main, kernels=(KernelSource(kernel.entry, kernel.text[:-1]),))
    damaged = replace(program, functions={"main": plan})
    with pytest.raises(KernelCompileError, match="compile the model again"):
        Executor(damaged, device)


def test_a_language_model_decodes_on_it(device: Device, tmp_path: Path) -> None:
    """With caches that are updated in place, and tokens that are chosen on the device."""
    decoder, prompt = make_decoder(tmp_path, "Qwen2", cache_length=32, prefill=(8,)), [3, 1, 4, 1, 5]
    tokens = [token.id for token in Generator(decoder.folder, device=device).generate(prompt, 4)]
    check_greedy(decoder, prompt, tokens)


def test_a_user_has_it_as_any_other(tmp_path: Path) -> None:
    """In a fresh interpreter, with the distribution on its path and nothing else told to it."""
    site = tmp_path / "site"
    site.mkdir()
    write_metadata(TOY_TARGET, site)
    path = os.pathsep.join(map(str, (site, TOY_TARGET, ROOT)))
    script = ROOT / "tests" / "packaging" / "toy_user.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "device toy" in ran.stdout  # of npu doctor


def test_the_core_does_not_know_it() -> None:
    for package in ("npu_compiler", "npu_runtime", "npu_cli"):
        for path in (ROOT / package).rglob("*.py"):
            assert "toy_" not in path.read_text(encoding="utf-8"), path
