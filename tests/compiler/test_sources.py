"""What `compile` and `partition` take for a model, and what they say of anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_ir import IR, extract_ir

import npu_compiler
from npu_compiler import extract, is_op_supported, partition
from npu_compiler.errors import CompileError, IRError
from npu_compiler.frontend.ir_source import load_json


class Model(nn.Module):
    """Holds data types and devices in the attributes of its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(4, dtype=torch.float32, device=x.device)
        shifted: torch.Tensor = self.fc(x) + ones
        return shifted.to(torch.float16).to(torch.float32, memory_format=torch.contiguous_format)


@pytest.fixture(scope="module")
def ir() -> IR:
    with torch.device("meta"):
        return extract_ir(Model(), (torch.zeros(2, 8),))


def as_text(value: Any) -> Any:
    """As a dump that falls back to strings has it."""
    return json.loads(json.dumps(value, default=str))


def shortened(ir: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(ir, default=lambda value: str(value).removeprefix("torch.")))  # type: ignore[no-any-return]


def with_full_names(ir: dict[str, Any]) -> dict[str, Any]:
    """Tensors' data types as ``torch.float32``, and as torch's own objects."""
    changed: dict[str, Any] = as_text(ir)
    for entry in (*changed["graph_inputs"], *changed["weights"]):
        entry["dtype"] = f"torch.{entry['dtype']}"
    for node in changed["nodes"]:
        for entry in (*node["inputs"], *node["outputs"]):
            entry["dtype"] = getattr(torch, entry["dtype"])
            entry["shape"] = torch.Size(entry["shape"])
    return changed


def test_every_form_of_an_ir_gives_the_same_program(ir: IR, tmp_path: Path) -> None:
    data = ir.to_dict()
    assert any(isinstance(v, torch.dtype) for node in data["nodes"] for v in node["attrs"].values())
    path = tmp_path / "model.json"
    path.write_text(json.dumps(as_text(data)))
    wanted = npu_compiler.compile(shortened(data)).to_bytes()
    plan = partition(shortened(data))
    for source in (ir, data, as_text(data), with_full_names(data), path, str(path)):
        assert npu_compiler.compile(source).to_bytes() == wanted
        assert partition(source).report() == plan.report()
        json.dumps(load_json(source))
    assert npu_compiler.compile({"main": ir}).to_bytes() == wanted
    assert all(is_op_supported(node) for node in ir.nodes)


def test_what_is_json_already_is_not_copied(ir: IR) -> None:
    data = shortened(ir.to_dict())
    assert load_json(data) is data


def test_an_extraction_is_taken_as_it_is(tmp_path: Path) -> None:
    extraction = extract(Model(), torch.zeros(2, 8), tmp_path / "model.json")
    wanted = npu_compiler.compile(extraction.ir).to_bytes()
    assert npu_compiler.compile(extraction).to_bytes() == wanted
    assert npu_compiler.compile({"main": extraction}).to_bytes() == wanted
    assert partition(extraction) == partition(extraction.ir)


def test_a_constant_of_the_ir_keeps_its_values() -> None:
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([1.0, 2.0])

    ir = extract_ir(Shifted().eval(), (torch.zeros(2),), strict=False)
    (constant,) = load_json(ir)["constants"].values()
    assert constant["data"] == [1.0, 2.0]
    (recipe,) = npu_compiler.compile(ir).recipes
    assert recipe.data


@pytest.mark.parametrize("given", [None, 7, Model(), [1], IR, torch.zeros(2)], ids=lambda value: type(value).__name__)
def test_anything_else_is_refused_in_words(given: Any) -> None:
    for use in (npu_compiler.compile, partition):
        with pytest.raises(IRError, match=r"given a \w+, expected the path of an IR JSON file, the IR as a dict") as e:
            use(given)
        assert "npu_compiler.extract(model, inputs)" in str(e.value)


def test_a_mapping_of_names_to_something_else_is_refused_in_words() -> None:
    with pytest.raises(CompileError, match="expected an IR or a mapping of names to IRs"):
        npu_compiler.compile({"main": 3})
