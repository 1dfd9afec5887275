"""A small decoder with grouped heads, rotary positions, gated activation and a cache, whole, against PyTorch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from npu_compiler import CompiledProgram, compile, extract
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.metal.test_matmul import entries
from tests.support.running import host_array

_NUMPY = {torch.bfloat16: np.dtype(ml_dtypes.bfloat16), torch.float16: np.dtype("f2"), torch.float32: np.dtype("f4")}
VOCABULARY, HIDDEN, INNER, HEADS, KEY_HEADS, SIZE, LENGTH = 160, 64, 96, 4, 2, 16, 80


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self, spelled_out: bool) -> None:
        super().__init__()
        self.spelled_out = spelled_out
        self.before, self.after = RMSNorm(), RMSNorm()
        self.q = nn.Linear(HIDDEN, HEADS * SIZE)
        self.k, self.v = (nn.Linear(HIDDEN, KEY_HEADS * SIZE) for _ in range(2))
        self.o = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor, place: Tensor, turn: tuple[Tensor, Tensor], cache: tuple[Tensor, ...]) -> Any:
        y = self.before(x)
        q, k, v = (
            linear(y).view(1, -1, heads, SIZE).transpose(1, 2)
            for linear, heads in ((self.q, HEADS), (self.k, KEY_HEADS), (self.v, KEY_HEADS))
        )
        keys = cache[0].index_copy(2, place, rotated(k, *turn))
        values = cache[1].index_copy(2, place, v)
        mask = (torch.arange(LENGTH) <= place[:, None])[None, None]
        x = x + self.o(self.attend(rotated(q, *turn), keys, values, mask).transpose(1, 2).reshape(1, -1, HEADS * SIZE))
        y = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)), keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if not self.spelled_out:
            return nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        repeated = [
            x[:, :, None].expand(1, KEY_HEADS, HEADS // KEY_HEADS, LENGTH, SIZE).reshape(1, HEADS, LENGTH, SIZE)
            for x in (k, v)
        ]
        added = torch.where(mask, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
        scores = q @ repeated[0].transpose(2, 3) * SIZE**-0.5 + added
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ repeated[1]


class Decoder(nn.Module):
    def __init__(self, layers: int, spelled_out: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(spelled_out) for _ in range(layers))
        self.norm = RMSNorm()
        self.frequencies = 10000 ** -(torch.arange(0, SIZE, 2).float() / SIZE)  # no buffer: it stays float32

    def forward(self, tokens: Tensor, place: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        angles = torch.cat([place[:, None].float() * self.frequencies] * 2, -1)
        x = self.embedding(tokens)
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        updated: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x, *cache = layer(x, place, turn, caches[2 * number : 2 * number + 2])
            updated += cache
        return nn.functional.linear(self.norm(x), self.embedding.weight), *updated


def inputs(layers: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    caches = (torch.zeros(1, KEY_HEADS, LENGTH, SIZE, dtype=dtype) for _ in range(2 * layers))
    return (torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens), *caches)


class Session:
    """A program with its weights on the device."""

    def __init__(self, model: Decoder, tokens: int, dtype: torch.dtype, device: Device) -> None:
        extraction = extract(model, inputs(len(model.layers), tokens, dtype))
        program = compile(extraction.ir)
        weights = extraction.weights.items()
        arrays = {name: host_array(tensor.detach(), _NUMPY[tensor.dtype]) for name, tensor in weights}
        self.program, self.device = program, device
        self.executor, self.weights = Executor(program, device), load_weights(arrays, program, device)

    def run(self, tokens: Tensor, place: Tensor, caches: list[NPUBuffer]) -> tuple[Tensor, list[NPUBuffer]]:
        """The logits, and the caches as they are after it."""
        specs = self.program.input_specs
        buffers = dict(zip((spec.name for spec in specs[2:]), caches, strict=True))
        for spec, given in zip(specs, (tokens, place), strict=False):
            buffers[spec.name] = NPUBuffer.from_numpy(given.numpy(), self.device, spec)
        results = self.executor.run(buffers, self.weights)
        logits, *updated = self.program.output_specs
        values = torch.from_numpy(results[logits.name].to_numpy(logits).astype(np.float32))
        return values, [results[spec.name] for spec in updated]


def caches_on(device: Device, program: CompiledProgram, caches: tuple[Tensor, ...]) -> list[NPUBuffer]:
    specs = program.input_specs[2:]
    return [
        NPUBuffer.from_numpy(host_array(tensor, spec.host_dtype.numpy), device, spec)
        for spec, tensor in zip(specs, caches, strict=True)
    ]


@pytest.mark.parametrize("spelled_out", [False, True], ids=["op", "spelled out"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])
def test_prefill_then_decode(dtype: torch.dtype, spelled_out: bool) -> None:
    model = Decoder(2, spelled_out).eval()
    exact = Decoder(2, spelled_out).eval()
    model.to(dtype)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    device = Device("software-metal")
    prefill, decode = (Session(model, count, dtype, device) for count in (11, 1))
    tokens = torch.randint(VOCABULARY, (1, 15), generator=torch.Generator().manual_seed(1))
    expected = inputs(2, 1, torch.float32)[2:]
    caches = caches_on(device, prefill.program, inputs(2, 1, dtype)[2:])
    for first, last, session in ((0, 11, prefill), *((i, i + 1, decode) for i in range(11, 15))):
        place = torch.arange(first, last)
        with torch.no_grad():
            logits, *expected = exact(tokens[:, first:last], place, *expected)
        results, caches = session.run(tokens[:, first:last], place, caches)
        assert np.corrcoef(results.flatten(), logits.flatten())[0, 1] > 0.999
        margin = logits[0, -1].topk(2).values.diff().abs()
        assert results[0, -1].argmax() == logits[0, -1].argmax() or margin < 0.05 * logits.abs().max()


@pytest.mark.parametrize("spelled_out", [False, True], ids=["op", "spelled out"])
def test_launches(spelled_out: bool) -> None:
    """Six a layer for one token: norm and projections, rotation and cache, attention, output, norm and gate, down."""
    model = Decoder(3, spelled_out).eval().to(torch.bfloat16)
    extractions = [extract(model, inputs(3, count, torch.bfloat16)) for count in (1, 11)]
    decode, prefill = (compile(extraction.ir) for extraction in extractions)
    layer = ["matvec", "shared", "attention", "matvec", "matvec", "matvec"]
    assert entries(decode) == ["shared", *layer * 3, "matvec"]
    assert len(entries(prefill)) == 3 * 8 + 3
    assert len(decode.functions["main"].state) == len(prefill.functions["main"].state) == 6
