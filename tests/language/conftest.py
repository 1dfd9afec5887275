"""Language models, extracted once for all tests of this folder."""

from __future__ import annotations

import pytest

from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Generator
from tests.support.decoders import Decoder, make_decoder


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("software-metal")


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A Qwen2.5 with a cache of 128 tokens, and prefill of 16 and 48."""
    return make_decoder(tmp_path_factory.mktemp("qwen"), "Qwen2", prefill=(16, 48))


@pytest.fixture(scope="session")
def generator(qwen: Decoder, device: Device) -> Generator:
    return Generator(qwen.folder, device)


@pytest.fixture(scope="session")
def program(qwen: Decoder, generator: Generator) -> CompiledProgram:
    """What the generator compiled, and left in the folder."""
    return CompiledProgram.load(qwen.folder / f"model.{generator.model.device.target}.npubin")
