"""Who imports whom, by reading the sources: imports for annotations only and imports inside of functions count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    "npu_compiler": set[str](),
    "software_gpu": {"npu_compiler"},
    "metal_compiler": {"npu_compiler"},
    "cuda_compiler": {"npu_compiler"},
    "npu_runtime": {"npu_compiler"},
    "metal_runtime": {"npu_compiler", "npu_runtime", "software_gpu"},
    "cuda_runtime": {"npu_compiler", "npu_runtime", "cuda_compiler"},  # of its compiler, what its programs hold
    "npu_model": {"npu_compiler", "npu_runtime"},
    "npu_text": {"npu_compiler", "npu_runtime", "npu_model"},
    "npu_cli": {"npu_compiler", "npu_runtime", "npu_model", "npu_text"},
}

# The names that users know: `npu_runtime` looks them up in the layers above when someone asks for them.
FORWARDS = {"npu_runtime": {"npu_model", "npu_text.generator"}}

# What a device's side may know of the compiler: what a compiled model consists of, and how PyTorch's ops are called.
OF_THE_COMPILER = {
    *("artifact", "compiled_program", "partitioning.plan", "tensor.layout"),
    *("ops.binding", "ops.registry", "frontend.evidence", "frontend.coded_operator"),
    *("ir", "dtypes", "errors", "integers", "plugins"),
}

# What each room of the compiler may import of the others; modules beside the rooms are told apart by their own names.
ROOMS = {
    "tensor": {"dtypes", "errors", "integers"},
    "artifact": {"tensor", "dtypes", "errors", "integers", "plugins", "records"},
    "ops": {"ir", "tensor", "dtypes", "errors", "integers", "plugins"},
    "graph": {"ir", "ops", "artifact", "tensor", "dtypes", "errors", "integers"},
    "frontend": {"ir", "graph", "ops", "artifact", "tensor", "dtypes", "errors", "integers"},
    "lowering": {"ir", "graph", "artifact", "tensor", "dtypes", "errors", "integers", "plugins", "records"},
    "partitioning": {
        *("frontend", "lowering", "graph", "ops", "artifact", "tensor"),
        *("ir", "dtypes", "errors", "integers", "compiler", "op_support"),
    },
}


@cache
def modules() -> dict[str, Path]:
    """The file of each module, by its dotted name; a package goes by its own name."""
    files = [path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")]
    names = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    dotted = [".".join(name[:-1] if name[-1] == "__init__" else name) for name in names]
    return dict(zip(dotted, files, strict=True))


@cache
def imported(module: str) -> frozenset[str]:
    """Everything that a module imports; of what is imported from a module, the module."""
    return frozenset(_imported(ast.parse(modules()[module].read_text())))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "relative imports hide who imports whom"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules() else node.module


def importers(library: str) -> set[str]:
    """The modules that import a library, or part of it."""
    return {module for module in modules() for name in imported(module) if name.split(".")[0] == library}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_depend_one_way(package: str) -> None:
    own = [module for module in modules() if module.split(".")[0] == package]
    names = {name for module in own for name in imported(module) - FORWARDS.get(module, set())}
    found = {name.split(".")[0] for name in names} & MAY_IMPORT.keys()
    assert found - {package} <= MAY_IMPORT[package]


@pytest.mark.parametrize("package", ["npu_runtime", "metal_runtime", "cuda_runtime"])
def test_the_runtime_compiles_nothing(package: str) -> None:
    own = [module for module in modules() if module.split(".")[0] == package]
    names = {name for module in own for name in imported(module) if name.split(".")[0] == "npu_compiler"}
    allowed = tuple(f"npu_compiler.{name}." for name in OF_THE_COMPILER)
    assert names
    assert {name for name in names if not f"{name}.".startswith(allowed)} == set()
    compilers = {name for module in own for name in imported(module) if name.partition(".")[0].endswith("_compiler")}
    allowed = ("npu_compiler.", f"{package.partition('_')[0]}_compiler.artifact.")
    assert {name for name in compilers if not f"{name}.".startswith(allowed)} == set()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_compiler_depend_one_way(room: str) -> None:
    own = [module for module in modules() if module.split(".")[:2] == ["npu_compiler", room]]
    names = [name.split(".") for module in own for name in imported(module)]
    assert own
    assert {parts[1] for parts in names if parts[0] == "npu_compiler"} - {room} <= ROOMS[room]


@pytest.mark.parametrize("path", sorted(ROOT.glob("*_compiler/*/")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_room_says_what_it_is(path: Path) -> None:
    if path.name not in ("__pycache__", "kernels"):
        assert ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8")))


def test_the_core_names_no_package_of_a_target() -> None:
    for package in ("npu_compiler", "npu_runtime"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"""["'](metal|cuda)_(compiler|runtime)\b""", text), path


def test_no_circles() -> None:
    graph = {module: (imported(module) & modules().keys()) - {module} for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go round: {' -> '.join(error.args[1])}")


def test_the_software_gpu_knows_of_the_compiler_only_its_errors_and_whole_numbers() -> None:
    used = {name for module in modules() if module.startswith("software_gpu") for name in imported(module)}
    assert {name for name in used if name.startswith("npu_compiler")} == {
        "npu_compiler.errors",
        "npu_compiler.integers",
    }


def test_gpu_libraries_have_one_door_each() -> None:
    assert importers("cupy") == {"cuda_runtime.cupy_api"}
    without_torch = ("npu_compiler", "metal_", "software_gpu", "cuda_")
    found = {module for module in importers("torch") if module.startswith(without_torch)}
    assert found
    assert all(module.startswith("npu_compiler.frontend.") for module in found)
