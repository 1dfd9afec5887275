"""Extraction: what the IR and the weight file hold, and that they compute what the model computes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from npu_compiler.frontend.extraction import extract
from tests.support.extraction import Function, check_computes, nodes_of


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 32, bias=False), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, dim=-1)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        x = x + functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)
        result: torch.Tensor = x + self.mlp(x)
        return result


def test_block_computes_the_same() -> None:
    check_computes(Block().eval(), (torch.randn(2, 5, 16),))


def test_attention_by_keyword_keeps_mask_and_scale() -> None:
    extraction = extract(Block().eval(), (torch.randn(2, 5, 16),))
    (node,) = nodes_of(extraction, "aten.scaled_dot_product_attention.default")
    assert len(node["inputs"]) == 4
    assert node["attrs"]["scale"] == 0.25
    assert node["attrs"]["dropout_p"] == 0.0


def test_absent_mask_is_recorded() -> None:
    model = Function(lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    (node,) = nodes_of(extract(model, torch.randn(1, 2, 4, 8)), "aten.scaled_dot_product_attention.default")
    assert node["attrs"]["attn_mask"] is None
    assert node["attrs"]["is_causal"] is True


def test_batch_norm_without_weight_and_bias_is_recorded() -> None:
    extraction = extract(nn.BatchNorm2d(3, affine=False).eval(), torch.randn(1, 3, 4, 4))
    (node,) = nodes_of(extraction, "aten.batch_norm.default")
    assert [tensor["name"] for tensor in node["inputs"]] == ["input", "b_running_mean", "b_running_var"]
    assert node["attrs"]["weight"] is None
    assert node["attrs"]["bias"] is None


def test_absent_convolution_bias_is_recorded() -> None:
    extraction = check_computes(nn.Conv2d(3, 4, 3, bias=False).eval(), (torch.randn(1, 3, 8, 8),))
    (node,) = nodes_of(extraction, "aten.conv2d.default")
    assert node["attrs"]["bias"] is None


def test_tensor_by_keyword_becomes_an_input() -> None:
    model = Function(lambda x, low: torch.ops.aten.clamp.Tensor(x, max=low))
    (node,) = nodes_of(extract(model, (torch.randn(3), torch.randn(3))), "aten.clamp.Tensor")
    assert [tensor["name"] for tensor in node["inputs"]] == ["args_0", "args_1"]
    assert node["attrs"] == {"min": None}


def test_attributes_are_json() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4, dtype=torch.float32, device=x.device)
        return (x + positions).to(torch.float16).clone(memory_format=torch.contiguous_format)

    extraction = check_computes(Function(forward), (torch.randn(2, 4),))
    (arange,) = nodes_of(extraction, "aten.arange.default")
    assert arange["attrs"]["dtype"] == "float32"
    assert arange["attrs"]["device"] == "cpu"
    (clone,) = nodes_of(extraction, "aten.clone.default")
    assert clone["attrs"]["memory_format"] == "contiguous_format"


def test_infinities_survive_json() -> None:
    extraction = check_computes(Function(lambda x: x.masked_fill(x < 0, float("-inf"))), (torch.randn(3, 3),))
    (node,) = nodes_of(extraction, "aten.masked_fill.Scalar")
    assert json.loads(json.dumps(node))["attrs"]["value"] == float("-inf")


def test_constants_keep_their_values() -> None:
    extraction = check_computes(Function(lambda x: x * torch.tensor([1.0, float("inf"), 3.0])), (torch.ones(3),))
    (name,) = extraction.weights
    assert extraction.ir["constants"] == {name: {"data": [1.0, float("inf"), 3.0], "dtype": "float32"}}
    assert extraction.ir["weight_name_mapping"] == {f"c_{name}": name}


def test_large_constants_stay_out_of_the_ir() -> None:
    table = torch.randn(64, 64)
    extraction = extract(Function(lambda x: x @ table), torch.randn(2, 64))
    assert "constants" not in extraction.ir
    assert any(torch.equal(tensor, table) for tensor in extraction.weights.values())


class Rotary(nn.Module):
    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.frequencies


def test_buffers_outside_the_state_dict_are_included() -> None:
    extraction = check_computes(Rotary().eval(), (torch.randn(2, 4),))
    assert set(extraction.weights) == {"frequencies"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def test_tied_weights_are_stored_once() -> None:
    extraction = check_computes(Tied().eval(), (torch.arange(5)[None],))
    assert list(extraction.weights) == ["embedding.weight"]
    assert [weight["name"] for weight in extraction.ir["weights"]] == ["embedding.weight"]
    assert set(extraction.ir["weight_name_mapping"].values()) == {"embedding.weight"}


def test_gradient_and_autocast_regions_are_flattened() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            return (x * 2).float()

    extraction = check_computes(Function(forward), (torch.randn(3),))
    assert nodes_of(extraction, "aten.mul.Tensor")


def test_files_hold_what_the_ir_names(tmp_path: Path) -> None:
    model = Block().eval().to(torch.bfloat16)
    extraction = extract(model, torch.randn(1, 3, 16, dtype=torch.bfloat16), tmp_path / "block.json", model_name="tiny")
    assert extraction.ir_path == tmp_path / "block.json"
    assert extraction.weights_path == tmp_path / "block.safetensors"
    assert json.loads(extraction.ir_path.read_bytes()) == extraction.ir
    assert extraction.ir["model_name"] == "tiny"
    weights = load_file(extraction.weights_path)
    assert set(weights) == {weight["name"] for weight in extraction.ir["weights"]}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0)
    assert sorted(tmp_path.iterdir()) == [extraction.ir_path, extraction.weights_path]


def test_odd_tensors_reach_the_file(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("transposed", torch.arange(6).reshape(2, 3).T)
            self.register_buffer("scalar", torch.tensor(3.0))
            self.register_buffer("empty", torch.zeros(0, 2))
            self.register_buffer("flags", torch.tensor([True, False]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = Odd().eval()
    weights = load_file(extract(model, torch.ones(1), tmp_path / "odd.json").weights_path or "")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0)


def test_keyword_inputs() -> None:
    extraction = extract(Tied().eval(), {"tokens": torch.arange(5)[None]})
    assert [tensor["name"] for tensor in extraction.ir["graph_inputs"]] == ["tokens"]


class Reassigned(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(x.device)
        return x + self.table


def test_a_buffer_that_is_assigned_itself_does_not_change() -> None:
    check_computes(Reassigned().eval(), (torch.randn(2, 3),))


class Asserting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum().item()
        torch._check(count <= x.numel())
        return x * 2


def test_an_assertion_about_values_is_left_out() -> None:
    extraction = check_computes(Asserting().eval(), (torch.randn(2, 3),))
    assert not nodes_of(extraction, "aten.item.default")


class LeavingOut(nn.Module):
    """Layers are left out at random in training, and a number is drawn for it in any mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand([])
        return x if self.training and drawn < 0.1 else x * 2


def test_random_numbers_that_nobody_reads_are_left_out() -> None:
    extraction = check_computes(LeavingOut().eval(), (torch.randn(2, 3),))
    assert not nodes_of(extraction, "aten.rand.default")
