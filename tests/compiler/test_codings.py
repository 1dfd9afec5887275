"""Data types that tensors are only stored in: their codes against PyTorch's, and one that only a test knows."""

from __future__ import annotations

import json
import struct
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
from npu_compiler.dtypes import DType, add
from npu_compiler.errors import IRError, UnsupportedOpError, WeightError
from npu_runtime import Device, Model, load
from tests.support.ir_builder import IRBuilder
from tests.support.stored_types import (
    CODED,
    Stores,
    assert_same_codes,
    check_stores,
    every_code,
    hard_numbers,
    torch_type,
)

ROOT = Path(__file__).parents[2]
each_coded = pytest.mark.parametrize("kind", CODED, ids=str)


class _Numpy:
    """`Arithmetic` over arrays."""

    where = staticmethod(np.where)

    def bits(self, number: Any) -> Any:
        return np.asarray(number, np.float32).view(np.int32)

    def of_bits(self, bits: Any) -> Any:
        return np.asarray(bits, np.int32).view(np.float32)


@each_coded
def test_codes_mean_and_numbers_become_what_they_do_in_torch(kind: DType) -> None:
    assert kind.coding is not None
    numbers = kind.coding.decode(np.arange(256, dtype=np.int32), _Numpy())
    np.testing.assert_array_equal(numbers, every_code(kind).float().numpy())
    hard = hard_numbers(kind)
    with np.errstate(all="ignore"):
        codes = kind.coding.encode(hard.numpy(), _Numpy()).astype(np.uint8)
    assert_same_codes(torch.from_numpy(codes).view(torch_type(kind)), hard.to(torch_type(kind)))


@each_coded
def test_a_stored_type_loads_computes_and_stores(kind: DType, tmp_path: Path) -> None:
    """From a safetensors file through kernels of the software GPU, every code among what is loaded."""
    check_stores(kind, Device("software-metal"), tmp_path)


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
    module = Stores(torch_type(kind)).eval()
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


def test_no_other_file_knows_a_stored_type_by_name() -> None:
    packages = [file.parent for file in ROOT.glob("*/__init__.py") if file.parent.name not in ("tests", "benchmarks")]
    texts = {file.relative_to(ROOT): file.read_text() for folder in packages for file in folder.rglob("*.py")}
    for kind in CODED:
        named = {str(file) for file, text in texts.items() if kind.name in text}
        assert {file for file in named if "/checkpoints/" not in file} == {
            "npu_compiler/dtypes.py"
        }  # formats name theirs


def test_a_name_is_taken_once() -> None:
    with pytest.raises(IRError, match="there is already float16; choose other names"):
        add(DType("half2", 2, 2, 0, "F16"))
