"""Choosing a device."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

import metal_runtime
import npu_runtime
from metal_runtime.metal_api import software_metal
from npu_compiler.errors import DeviceError, MissingDependencyError, OutOfMemoryError, ToolchainError
from npu_runtime import Backend, Device, MetalBackend, NPUBuffer
from npu_runtime import device as device_module
from npu_runtime.device_kind import DeviceKind


def test_a_device_is_named_and_opened_once() -> None:
    first, second = Device("software-metal"), Device("software-metal:0")
    assert first.backend is second.backend
    assert (first.name, first.target) == ("software-metal", "metal")
    assert isinstance(first.backend, Backend)
    assert "software-metal" in repr(first)
    assert "metal" in repr(first)


def test_the_best_device_is_found() -> None:
    assert Device().name in ("metal", "cuda", "software-metal")


def test_the_best_device_for_a_target_is_found() -> None:
    assert Device.for_target("metal").name in ("metal", "software-metal")
    with pytest.raises(DeviceError, match="no device that runs programs for the target 'abacus'"):
        Device.for_target("abacus")


def test_a_backend_that_is_open_makes_a_device() -> None:
    backend = MetalBackend(software_metal())
    assert Device(backend).backend is backend


@pytest.mark.parametrize("name", ["gpu", "", "metal:x", "cuda:", "cuda:-1", "Metal"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(DeviceError, match=r"expected one of metal, cuda, software-metal"):
        Device(name)


def test_a_second_metal_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="this machine has one such device; use 'software-metal'"):
        Device("software-metal:1")


@pytest.mark.skipif(platform.system() == "Darwin", reason="has an Apple GPU")
def test_metal_without_an_apple_gpu_names_the_software_gpu() -> None:
    with pytest.raises(DeviceError, match=r"this machine runs Linux; Device\('software-metal'\)"):
        Device("metal")


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DeviceKind("cuda", "no_such_package.backend:Missing", 10, "pip install 'npu-compiler[cuda]'")
    monkeypatch.setattr(device_module, "_kind", lambda name: kind)
    device_module._open.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"needs the package 'no_such_package': pip install .*\[cuda\]"):
        Device("cuda:1")


def test_the_first_device_that_opens_is_taken_and_reasons_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, ordinal: int) -> Any:
        raise ToolchainError(f"no {name} today")

    monkeypatch.setattr(device_module, "_open", refuse)
    with pytest.raises(
        DeviceError, match=r"(?s)metal: no metal today.*cuda: no cuda.*software-metal: no software-metal"
    ):
        Device()


@pytest.mark.parametrize("count", [1 << 44, 1 << 66])
def test_more_memory_than_there_is_is_refused(device: Device, count: int) -> None:
    with pytest.raises(OutOfMemoryError, match=r"could not allocate .*iB; it works well with up to"):
        NPUBuffer.zeros((count,), device)


def test_no_name_of_an_op_is_in_the_runtime() -> None:
    """The runtime replays what a program says; a kernel or an op that it knew would be a second place to change.

    What runs ops in PyTorch names ATen, but no op of it; what samples tokens computes a softmax of its own.
    """
    files = [path for package in (npu_runtime, metal_runtime) for path in Path(package.__path__[0]).glob("*.py")]
    sources = "".join(path.read_text() for path in files if path.name != "sampling.py").lower()
    for word in ("conv2d", "convolution", "matmul", "softmax", "relu", "batch_norm", "attention"):
        assert word not in sources
