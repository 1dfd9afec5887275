"""Targets and devices of other distributions, found by their entry points."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import npu_compiler
import npu_runtime
from npu_compiler import plugins
from npu_compiler.artifact.extension import LaunchExtension
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import CompileError, DeviceError, MissingDependencyError, ProgramFormatError
from npu_compiler.lowering.target import CodegenTarget, target_named, target_names
from npu_runtime import Device
from npu_runtime import device as device_module
from tests.runtime.plans import axpy_plan, axpy_program

Install = Callable[[str], None]
STRANGER = """
    from dataclasses import dataclass

    from metal_compiler.target import MetalTarget
    from metal_runtime import MetalBackend
    from npu_compiler.artifact.extension import LaunchExtension, TargetExtensions
    from npu_runtime.device_kind import DeviceKind

    @dataclass(frozen=True)
    class Beads(LaunchExtension):
        count: int

        def fault(self, grid, block):
            return "" if self.count > 0 else f"has {self.count} beads"

        def describe(self):
            return f"on {self.count} beads"

    EXTENSIONS = TargetExtensions(launch=Beads)

    class AbacusTarget(MetalTarget):
        name = "abacus"

    class AbacusBackend(MetalBackend):
        target = "abacus"

        @classmethod
        def open(cls, name, ordinal):
            return super().open("software-metal", ordinal)

    ABACUS = DeviceKind("abacus", "stranger_package:AbacusBackend", 5, "learn to count")
    BROKEN = DeviceKind("abacus", "no_such_package:Backend", 6, "learn to count")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with these entry points ahead of all others on Python's path."""

    def put(entry_points: str) -> None:
        (tmp_path / "stranger_package.py").write_text(textwrap.dedent(STRANGER))
        metadata = tmp_path / "stranger-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(plugins, "entry_points_of", plugins.entry_points_of.__wrapped__)
        for module in (device_module, npu_compiler.lowering.target, npu_compiler.artifact.extension):
            monkeypatch.setattr(module, "entry_points_of", plugins.entry_points_of)
        device_module._kind.cache_clear()

    yield put
    sys.modules.pop("stranger_package", None)


def test_the_targets_and_devices_of_this_project_are_found() -> None:
    assert {"cuda", "metal"} <= set(target_names())
    assert [name for name in device_module.device_names() if "cuda" in name or "metal" in name] == [
        *("metal", "cuda", "software-metal")
    ]
    assert npu_runtime.MetalBackend.target == "metal"
    assert all(isinstance(target_named(name), CodegenTarget) for name in ("cuda", "metal"))


def test_another_distribution_adds_a_target_and_a_device(install: Install) -> None:
    install(
        """
        [npu.targets]
        abacus = stranger_package:AbacusTarget
        [npu.devices]
        abacus = stranger_package:ABACUS
        """
    )
    assert target_names() == ("abacus", "cuda", "metal")
    assert target_named("abacus").name == "abacus"
    assert Device.for_target("abacus").name == "abacus"
    assert npu_runtime.AbacusBackend is type(Device("abacus").backend)


def test_a_device_that_does_not_load_leaves_the_others(install: Install) -> None:
    install(
        """
        [npu.devices]
        lost = no_such_package:KIND
        broken = stranger_package:BROKEN
        """
    )
    assert Device().backend is not None
    with pytest.raises(MissingDependencyError, match=r"'lost' in 'npu\.devices' .*the package 'no_such_package'"):
        Device("lost")
    with pytest.raises(DeviceError, match=r"broken: .*needs the package 'no_such_package': learn to count"):
        Device.for_target("abacus")


def test_metal_is_compiled_for_where_no_target_is_named() -> None:
    assert target_named().name == "metal"


def test_another_distribution_may_say_what_is_compiled_for(install: Install) -> None:
    install("[npu.defaults]\ntarget = stranger_package:AbacusTarget\n")
    assert target_named().name == "abacus"
    assert target_named("metal").name == "metal"


def test_another_distribution_extends_what_its_programs_hold(install: Install) -> None:
    install("[npu.extensions]\nabacus = stranger_package:EXTENSIONS\ncounts = stranger_package:ABACUS\n")
    beads: Any = import_module("stranger_package").Beads
    program = _extended(beads(10))
    loaded = CompiledProgram.from_bytes(program.to_bytes())
    assert loaded == program
    assert "block [32, 1, 1] on 10 beads" in loaded.describe()
    with pytest.raises(ProgramFormatError, match="step 'inner' has -1 beads"):
        CompiledProgram.from_bytes(_extended(beads(-1)).to_bytes())
    with pytest.raises(ProgramFormatError, match=r"'counts' .*expected an object of TargetExtensions"):
        CompiledProgram.from_bytes(replace(program, target="counts").to_bytes())


def _extended(extension: LaunchExtension) -> CompiledProgram:
    first, *others = axpy_plan().steps
    assert isinstance(first, KernelCall)
    plan = replace(axpy_plan(), steps=(replace(first, extension=extension), *others))
    return replace(axpy_program(), target="abacus", functions={"main": plan})


def test_what_is_no_target_and_no_device_is_refused(install: Install) -> None:
    install(
        """
        [npu.targets]
        counts = stranger_package:ABACUS
        [npu.devices]
        counts = stranger_package:AbacusTarget
        """
    )
    with pytest.raises(CompileError, match=r"'counts' .*expected a subclass of CodegenTarget"):
        target_named("counts")
    with pytest.raises(DeviceError, match=r"'counts' .*expected a DeviceKind"):
        Device("counts")


def test_the_first_on_the_path_has_a_name_that_two_distributions_have(install: Install) -> None:
    install("[npu.targets]\nmetal = stranger_package:AbacusTarget\n")
    assert target_names() == ("cuda", "metal")
    assert target_named("metal").name == "abacus"


def test_sources_that_are_not_installed_are_told_from_a_wrong_name() -> None:
    with pytest.raises(MissingDependencyError, match=r"'npu\.nothing'.*run `pip install -e \.`"):
        plugins.entry_points_of("npu.nothing")
