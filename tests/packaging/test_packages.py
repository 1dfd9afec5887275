"""What an installation brings, and what it says about itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import npu_compiler

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "npu_compiler/__init__.py"
    assert f'__version__ = "{npu_compiler.__version__}"' in (ROOT / "npu_compiler" / "__init__.py").read_text()


def test_every_python_that_is_tried_is_declared() -> None:
    from tests.packaging.pythons import VERSIONS

    declared = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]
    assert declared == list(VERSIONS)


def test_the_hosts_workflow_asks_for_what_make_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert len(lines) == len(workflow["jobs"])
    for line in lines:
        make, *words = line.split()
        assert make == "make"
        assert {word for word in words if "=" not in word} <= targets
