"""Data types that tensors are only stored in: their codes against PyTorch's, and one that only a test knows."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from npu_compiler import dtypes
from npu_compiler.codings import Arithmetic, Coding
from npu_compiler.dtypes import ALL, DType, add
from npu_compiler.errors import IRError, UnsupportedOpError, WeightError
from npu_runtime import Device, Model, load
from tests.support.ir_builder import IRBuilder

ROOT = Path(__file__).parents[2]
CODED = [kind for kind in ALL if kind.coding is not None]
each_coded = pytest.mark.parametrize("kind", CODED, ids=str)


class _Numpy:
    """`Arithmetic` over arrays."""

    where = staticmethod(np.where)

    def bits(self, number: Any) -> Any:
        return np.asarray(number, np.float32).view(np.int32)

    def of_bits(self, bits: Any) -> Any:
        return np.asarray(bits, np.int32).view(np.float32)


def torch_type(kind: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, kind.name)
    return found


def every_code(kind: DType) -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).view(torch_type(kind))


def hard_numbers(kind: DType) -> torch.Tensor:
    """Random float32, the type's own numbers, halfway between them and next to that, and what is beyond."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (20000,), generator=random).to(torch.int32).view(torch.float32)
    own = every_code(kind).float()
    own = own[own.isfinite()].unique()
    halfway = (own[1:] + own[:-1]) / 2
    near = [torch.nextafter(halfway, torch.tensor(to)) for to in (float("inf"), -float("inf"))]
    beyond = torch.tensor([*(float(own.max()) * x for x in (1.03, 1.04, 1.07, 1.2, 9)), float("inf"), float("nan")])
    return torch.cat([bits, own, halfway, *near, beyond, -beyond, torch.randn(20000, generator=random)])


def assert_same_codes(given: torch.Tensor, expected: torch.Tensor) -> None:
    """Of two tensors of codes, where the sign of a NaN does not count: PyTorch's own depends on where it lies."""
    is_nan = expected.float().isnan()
    assert given.float().isnan().equal(is_nan)
    assert given.view(torch.uint8)[~is_nan].equal(expected.view(torch.uint8)[~is_nan])


@each_coded
def test_codes_mean_and_numbers_become_what_they_do_in_torch(kind: DType) -> None:
    assert kind.coding is not None
    numbers = kind.coding.decode(np.arange(256, dtype=np.int32), _Numpy())
    np.testing.assert_array_equal(numbers, every_code(kind).float().numpy())
    hard = hard_numbers(kind)
    with np.errstate(all="ignore"):
        codes = kind.coding.encode(hard.numpy(), _Numpy()).astype(np.uint8)
    assert_same_codes(torch.from_numpy(codes).view(torch_type(kind)), hard.to(torch_type(kind)))


class _Stores(torch.nn.Module):
    """Loads, computes with and stores a type; moves what it does not compute with."""

    weight: torch.Tensor

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.bias = torch.nn.Parameter(torch.zeros(24).half())  # a half model: float32 inputs stay what they are
        self.register_buffer("weight", (torch.arange(24 * 40) % 91).to(torch.uint8).view(kind).reshape(24, 40))

    def forward(self, x: torch.Tensor, hard: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.weight.to(x.dtype)
        moved = torch.cat([codes, codes.t()], 1)
        rows = torch.nn.functional.embedding(torch.tensor([1, 3]), self.weight)
        return x @ weight.t() + self.bias, hard.to(self.kind), codes.to(torch.float32), moved, rows


@each_coded
def test_a_stored_type_loads_computes_and_stores(kind: DType, tmp_path: Path) -> None:
    """From a safetensors file through kernels of the software GPU, every code among what is loaded."""
    module = _Stores(torch_type(kind)).eval()
    inputs = torch.rand(3, 40).half(), hard_numbers(kind), every_code(kind).reshape(16, 16)
    npu_compiler.extract(module, inputs, tmp_path / "m.json")
    program = npu_compiler.compile(tmp_path / "m.json")
    model = load(program, tmp_path / "m.safetensors", Device("software-metal"))
    product, *results = model(*inputs)
    others = module(*inputs)[1:]
    exact = inputs[0].double() @ module.weight.double().t()
    torch.testing.assert_close(product.double(), exact, rtol=2e-3, atol=1e-3 * float(exact.abs().max()))
    assert [(r.dtype, r.shape) for r in results] == [(o.dtype, o.shape) for o in others]
    for result, other in zip(results, others, strict=True):
        if result.dtype == torch.float32:
            torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert_same_codes(result, other.contiguous())


@each_coded
def test_what_is_only_stored_is_not_computed_with(kind: DType) -> None:
    for op in ("add.Tensor", "mm.default", "neg.default", "amax.default"):
        builder = IRBuilder("codes")
        x = builder.input("x", (4, 4))
        operands = (x, x) if op in ("add.Tensor", "mm.default") else (x,)
        ir = builder.build(builder.call(f"aten.{op}", *operands))
        ir = json.loads(json.dumps(ir).replace("float32", kind.name))  # of which PyTorch may have no such op
        with pytest.raises(UnsupportedOpError, match=r"only stored; convert it with .to\(dtype\) first"):
            npu_compiler.compile(ir)


@each_coded
def test_weights_of_a_stored_type_are_neither_converted_nor_nan(kind: DType) -> None:
    module = _Stores(torch_type(kind)).eval()
    inputs = torch.rand(3, 40).half(), hard_numbers(kind), every_code(kind).reshape(16, 16)
    program = npu_compiler.compile(npu_compiler.extract(module, inputs))
    with pytest.raises(WeightError, match=f"given dtype float32, expected {kind}"):
        load(program, {**module.state_dict(), "weight": module.weight.float()}, Device("software-metal"))
    spoiled = module.weight.float()
    spoiled[1, 1] = float("nan")
    with pytest.raises(WeightError, match="1 of 960 values are NaN"):
        load(program, {**module.state_dict(), "weight": spoiled.to(torch_type(kind))}, Device("software-metal"))


@dataclass(frozen=True)
class _Eighths(Coding):
    """Eighths of a number from 0 on, what is too large being the largest."""

    def decode(self, code: Any, to: Arithmetic) -> Any:
        bits = to.of_bits(code | 0x4B000000)  # 2^23 and the code
        return (bits - 8388608.0) * 0.125

    def encode(self, number: Any, to: Arithmetic) -> Any:
        scaled = number * 8.0
        within = to.where(scaled < 255.0, scaled, 255.0)
        return to.bits(within + 8388608.0) & 255


@pytest.fixture
def eighths() -> Iterator[DType]:
    kind = add(DType("eighths", 1, 2, -1, "X8", _Eighths()))
    yield kind
    dtypes._BY_NAME.pop(kind.name)


def eighths_model(tmp_path: Path, codes: NDArray[np.uint8]) -> Model:
    """``x.to(eighths)`` and ``x @ weight.to(float16).T``, the weight in a file of that type."""

    def tensor(name: str, kind: str, *shape: int) -> dict[str, Any]:
        return {"name": name, "shape": list(shape), "dtype": kind}

    def node(op: str, result: dict[str, Any], *inputs: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        return {"name": result["name"], "op_type": op, "inputs": [*inputs], "outputs": [result], "attrs": attrs}

    rows, columns = codes.shape
    x, weight = tensor("x", "float16", 3, columns), tensor("w", "eighths", rows, columns)
    wide, stored = tensor("wide", "float16", rows, columns), tensor("stored", "eighths", 3, columns)
    product = tensor("product", "float16", 3, rows)
    ir = {
        "model_name": "eighths",
        "graph_inputs": [x],
        "graph_outputs": [stored, product],
        "weights": [weight],
        "weight_name_mapping": {"w": "w"},
        "nodes": [
            node("aten.to.dtype", stored, x, dtype="eighths"),
            node("aten.to.dtype", wide, weight, dtype="float16"),
            node("aten.linear.default", product, x, wide, bias=None),
        ],
    }
    header = json.dumps({"w": {"dtype": "X8", "shape": [rows, columns], "data_offsets": [0, codes.size]}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + codes.tobytes())
    npu_compiler.compile(ir, target="cuda")
    program = npu_compiler.compile(ir)
    return load(npu_compiler.CompiledProgram.from_bytes(program.to_bytes()), path, Device("software-metal"))


def test_a_data_type_is_added_in_one_place(eighths: DType, tmp_path: Path) -> None:
    """One entry of the table, and a type that nobody has heard of loads, computes and stores."""
    codes = np.arange(160, dtype=np.uint8).reshape(8, 20)
    model = eighths_model(tmp_path, codes)
    x = np.linspace(0, 40, 60).reshape(3, 20).astype(np.float16)
    stored, product = model(x)
    np.testing.assert_array_equal(stored, np.rint(np.minimum(x.astype(np.float32) * 8, 255)).astype(np.uint8))
    np.testing.assert_allclose(product, x.astype(np.float64) @ (codes / 8.0).T, rtol=2e-3)


def test_no_other_file_lists_the_small_floats() -> None:
    files = subprocess.run(["git", "grep", "-il", "float8", "--", "*.py"], cwd=ROOT, capture_output=True, text=True)
    found = {name for name in files.stdout.split() if not name.startswith(("tests/", "benchmarks/"))}
    assert found <= {"npu_compiler/dtypes.py"}


def test_a_name_is_taken_once() -> None:
    with pytest.raises(IRError, match="there is already float16; choose other names"):
        add(DType("half2", 2, 2, 0, "F16"))
