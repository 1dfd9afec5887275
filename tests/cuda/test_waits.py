"""Kernels that begin before the launch ahead has ended find addresses ahead of their wait for it.

For what they compute behind it everybody waits. It is seen in the machine code for compute capability 9.0: instructions
from the wait to the last load ahead of a barrier.
"""

from __future__ import annotations

import struct

import pytest
import torch

from cuda_compiler.attention import lowering
from cuda_runtime.nvrtc import compile_kernel
from npu_compiler.artifact.plan import KernelSource
from tests.cuda.test_attention_decode import Sizes
from tests.cuda.test_grouped_matvec import Case
from tests.cuda.test_integer_rows import launch_of
from tests.cuda.test_registers import attention_of

INSTRUCTION = 16  # bytes, whose lowest 12 bits say what it does
WAIT, LOAD, BARRIER = 0x82E, 0x981, 0xB1D

OUTPUT = Case(m=8, n=1536, zeros=True, behind="residual")
DOWN = Case(m=8, n=1536, k=8960, zeros=True, behind="residual")
BYTES = Case(m=8, n=1536, bits=8, kind=torch.int8, group=1536, behind="residual")


def machine_code(kernel: KernelSource) -> bytes:
    """A kernel's instructions, which are a section of an ELF file."""
    image = compile_kernel(kernel.text, kernel.entry, 90)
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    count, of_names = struct.unpack_from("<HH", image, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", image, sections + 64 * index) for index in range(count)]
    for name, _, _, _, begin, size in headers:
        at = headers[of_names][4] + name
        if image[at : image.index(b"\0", at)].decode() == f".text.{kernel.entry}":
            return image[begin : begin + size]
    raise AssertionError(f"no code of {kernel.entry}")


def behind_the_wait(kernel: KernelSource) -> int:
    """Instructions from the wait to the last load ahead of the next barrier."""
    code = machine_code(kernel)
    found = [struct.unpack_from("<Q", code, at)[0] & 0xFFF for at in range(0, len(code), INSTRUCTION)]
    after = found[found.index(WAIT) :]
    return max(at for at, each in enumerate(after[: after.index(BARRIER)]) if each == LOAD)


def product_of(case: Case) -> KernelSource:
    plan = case.program(torch.bfloat16).main
    kernel = plan.kernels[launch_of(plan).kernel]
    assert kernel.entry == "few_codes"
    return kernel


@pytest.fixture(autouse=True)
def masks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that attention begins early, as in all layers but the first."""
    monkeypatch.setattr(lowering, "_is_ready", lambda *_: True)


@pytest.mark.parametrize("case", [OUTPUT, DOWN, BYTES], ids=str)
def test_products_of_several_rows_load_their_vectors_at_once(case: Case) -> None:
    assert behind_the_wait(product_of(case)) < 50


@pytest.mark.parametrize("sizes", [Sizes(2048), Sizes(2048, rows=8)], ids=str)
def test_attention_loads_what_its_inputs_are_made_of_at_once(sizes: Sizes) -> None:
    assert behind_the_wait(attention_of(sizes)) < 85


def test_addresses_of_vectors_that_are_not_kept_ahead_are_noticed() -> None:
    kept = "            settle(source[index]);\n            settle(target[index]);\n"
    found = product_of(DOWN)
    assert found.text.count(kept) == 1
    assert behind_the_wait(KernelSource(found.entry, found.text.replace(kept, ""))) > behind_the_wait(found) + 20


def test_addresses_of_inputs_that_are_found_behind_the_wait_are_noticed() -> None:
    ahead, behind = "    const InputPlaces places(batch, group, OPERAND_ARGUMENTS p);\n", "    OwnPlaces own(batch,"
    found = attention_of(Sizes(2048, rows=8))
    assert found.text.count(ahead) == found.text.count(behind) == 1
    text = found.text.replace(ahead, "").replace(behind, ahead + behind)
    assert behind_the_wait(KernelSource(found.entry, text)) > behind_the_wait(found) + 20
