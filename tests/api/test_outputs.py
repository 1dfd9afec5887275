"""Outputs keep the names and the nesting that the module gives them: in IR, artifact, plan, and what `load` runs."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
import npu_runtime
from npu_compiler import CompiledProgram
from npu_compiler.artifact.output_structure import build, output_names, parse_structure, read_structure, usual_structure
from npu_compiler.errors import IRError, ProgramFormatError
from npu_model.model import NamedOutputs
from npu_runtime import Device
from tests.support.decoders import config, import_transformers

Tensor = torch.Tensor
Pair = namedtuple("Pair", ["low", "high"])
X = torch.linspace(-2, 2, 64 * 64).reshape(64, 64)


@dataclass
class Result:
    logits: Tensor
    states: list[Tensor]
    loss: Tensor | None = None


torch.export.register_dataclass(Result, serialized_type_name="tests.api.Result")


class Returning(torch.nn.Module):
    """Returns what a function makes of `low` and `high`, two tensors made of x."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any], mixed: bool) -> None:
        super().__init__()
        self._make, self._mixed = make, mixed

    def forward(self, x: Tensor) -> Any:
        high = (x @ x).relu()
        return self._make(torch.special.i1e(x) if self._mixed else -x, high)


# What a module returns of two tensors, and the names of its outputs; None stands for the name of a tensor.
RETURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str | None]]] = {
    "a tensor": (lambda a, b: a + b, [None]),
    "a tuple": (lambda a, b: (a, b), [None, None]),
    "a tuple of one": (lambda a, b: (a + b,), [None]),
    "a list": (lambda a, b: [b, a], [None, None]),
    "a dict": (lambda a, b: {"logits": a, "hidden": b}, ["logits", "hidden"]),
    "an ordered dict": (lambda a, b: OrderedDict(z=a, a=b), ["z", "a"]),
    "a nested dict": (lambda a, b: {"logits": a, "hidden": (a + 1, [b])}, ["logits", "hidden.0", "hidden.1.0"]),
    "a dict in a tuple": (lambda a, b: ({"x": a}, b), ["0.x", None]),
    "a named tuple": (lambda a, b: Pair(a, b), ["low", "high"]),
    "a dataclass": (lambda a, b: Result(a, [b, a + b]), ["logits", "states.0", "states.1"]),
    "one tensor twice": (lambda a, b: {"one": a, "other": a, "b": b}, ["one", "other", "b"]),
    "None, a number and text": (lambda a, b: {"a": a, "none": None, "n": 3, "f": 0.5, "b": b}, ["a", "b"]),
    "keys that clash": (lambda a, b: {"a.0": a, "a": [b]}, ["a.0", "a.0_1"]),
}


def same(given: Any, wanted: Any) -> None:
    """Compares nested values: types, names and numbers; a dataclass comes back as an object with the same fields."""
    if isinstance(wanted, Tensor):
        assert isinstance(given, torch.Tensor)
        assert given.dtype == wanted.dtype
        torch.testing.assert_close(given, wanted, rtol=2e-2, atol=2e-2)
        return
    if isinstance(wanted, Result):
        assert isinstance(given, NamedOutputs)
        assert given[0] is given.logits
        same(given.logits, wanted.logits)
        same(given["states"], wanted.states)
        return
    if isinstance(wanted, dict):
        assert list(given) == list(wanted)
        same(list(given.values()), list(wanted.values()))
        return
    if isinstance(wanted, tuple | list):
        assert len(given) == len(wanted)
        assert getattr(given, "_fields", None) == getattr(wanted, "_fields", None)
        assert isinstance(given, list) == isinstance(wanted, list)
        for pair in zip(given, wanted, strict=True):
            same(*pair)
        return
    assert given == wanted


@pytest.mark.parametrize("mixed", [False, True], ids=["whole", "mixed"])
@pytest.mark.parametrize("kind", RETURNED)
def test_a_module_s_result_comes_back_as_it_was(kind: str, mixed: bool, tmp_path: Path, device: Device) -> None:
    make, names = RETURNED[kind]
    module = Returning(make, mixed).eval()
    extraction = npu_compiler.extract(module, X, tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text()) == json.loads(json.dumps(extraction.ir))
    if mixed:
        model = npu_runtime.load(tmp_path / "m.json", device=device)
    else:
        program = npu_compiler.compile(tmp_path / "m.json")
        program.save(tmp_path / "m.npubin")
        assert CompiledProgram.load(tmp_path / "m.npubin") == program
        model = npu_runtime.load(tmp_path / "m.npubin", device=device)
    found = [spec.name for spec in model.outputs]
    tensors = [entry["name"] for entry in extraction.ir["graph_outputs"]]
    assert found == [name or tensor for name, tensor in zip(names, tensors, strict=True)]
    with torch.no_grad():
        same(model(X), module(X))


def test_an_input_changed_in_place_is_no_output_of_its_own(device: Device) -> None:
    class Changing(torch.nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            view = x.view(-1)
            x.add_(1)
            return {"seen": view * 2, "x": x}

    extraction = npu_compiler.extract(Changing().eval(), torch.zeros(4, 4))
    model = npu_runtime.load(extraction, device=device)
    assert [spec.name for spec in model.outputs] == ["seen", "x"]
    given = torch.zeros(4, 4)
    assert model(given)["seen"].eq(2).all()
    assert model(given)["x"].eq(1).all()


def test_outputs_of_transformers_keep_their_names(device: Device) -> None:
    transformers = import_transformers()
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config("Qwen2")).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"use_cache": False, "output_hidden_states": True}
    extraction = npu_compiler.extract(module, {"input_ids": ids, **options})
    model = npu_runtime.load(extraction, device=device)
    with torch.no_grad():
        expected = module(input_ids=ids, **options)
    result = model(input_ids=ids)
    assert list(result) == list(expected)
    torch.testing.assert_close(result.logits, expected.logits, rtol=2e-2, atol=2e-2)
    assert isinstance(result.hidden_states, tuple)
    assert [spec.name for spec in model.outputs][:2] == ["logits", "hidden_states.0"]
    np.testing.assert_allclose(result.hidden_states[1], expected.hidden_states[1], rtol=2e-2, atol=2e-2)


def test_a_single_tensor_and_a_tuple_leave_the_ir_as_it_was() -> None:
    for kind in ("a tensor", "a tuple"):
        assert "output_structure" not in npu_compiler.extract(Returning(RETURNED[kind][0], False).eval(), X).ir


BAD_STRUCTURES: list[Any] = [
    1,
    "0",
    [0, 1],
    {"tuple": [0]},
    {"tuple": [1, 0]},
    {"tuple": [0, 0]},
    {"tuple": [0, 1, 2]},
    {"tuple": [0, True]},
    {"set": [0, 1]},
    {"tuple": [0, 1], "list": []},
    {"tuple": {"0": 1}},
    {"dict": [0, 1]},
    {"dict": [["a", 0], ["b"]]},
    {"dict": [[["a"], 0], ["b", 1]]},
    {"fields": [[1, 0], ["b", 1]]},
    {"fields": [["__class__", 0], ["b", 1]]},
    {"namedtuple": [["a b", 0], ["b", 1]]},
    {"namedtuple": [["class", 0], ["b", 1]]},
    {"tuple": [0, 1, {"constant": [1]}]},
]


@pytest.mark.parametrize("structure", BAD_STRUCTURES, ids=json.dumps)
def test_a_broken_structure_is_refused_in_ir_and_artifact(structure: Any) -> None:
    extraction = npu_compiler.extract(Returning(RETURNED["a tuple"][0], False).eval(), X)
    for read in (npu_compiler.compile, npu_compiler.partition):
        with pytest.raises(IRError, match="the structure of the outputs: given"):
            read(extraction.ir | {"output_structure": structure})
    program = npu_compiler.compile(extraction.ir)
    plan = replace(program.main, structure=json.dumps(structure))
    with pytest.raises(ProgramFormatError, match="the structure of the outputs"):
        CompiledProgram.from_bytes(replace(program, functions={"main": plan}).to_bytes())


def test_a_structure_that_is_too_deep_is_refused() -> None:
    deep: Any = 0
    for _ in range(40):
        deep = {"list": [deep]}
    with pytest.raises(IRError, match="at most 32 deep"):
        read_structure(deep, 1)
    for text in ("[" * 100_000, '{"list":[' * 5000 + "0" + "]}" * 5000, "{"):
        with pytest.raises(IRError, match="the structure of the outputs"):
            parse_structure(text, 1)


def test_names_are_different_whatever_the_tensors_are_called() -> None:
    structure = {"tuple": [0, 1, {"dict": [["k", 2]]}, 3]}
    assert output_names(structure, ["mul", "mul", "mul", "2.k"]) == ("mul", "mul_1", "2.k", "2.k_1")
    assert output_names(usual_structure(3), ["a", "a", "a_1"]) == ("a", "a_1", "a_1_1")
    assert build(structure, "abcd", dict) == ("a", "b", {"k": "c"}, "d")
