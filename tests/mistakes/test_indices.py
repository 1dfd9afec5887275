"""Indices that a user gets wrong, in models as they are exported."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import npu_compiler
from npu_compiler.errors import InputError
from npu_runtime import Device, Executor, NPUBuffer, load_weights

LENGTH, WORDS = 6, 50

Run = Callable[[dict[str, torch.Tensor]], NDArray[Any]]


class BertLikeEmbeddings(nn.Module):
    """Words, positions of a buffer, and segments, added up and normalized, then a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.segments = nn.Embedding(WORDS, 16), nn.Embedding(8, 16), nn.Embedding(2, 16)
        self.position_ids = nn.Buffer(torch.arange(8)[None])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.segments(token_type_ids) + self.places(self.position_ids[:, :LENGTH])
        result: torch.Tensor = self.head(self.norm(x).mean(1))
        return result


class Cached(nn.Module):
    def forward(self, cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return cache.index_copy(1, position, new)


def run(model: nn.Module, example: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> NDArray[Any]:
    return prepared(model, example)(given)


def prepared(model: nn.Module, example: dict[str, torch.Tensor]) -> Run:
    device = Device("software-metal")
    extraction = npu_compiler.extract(model.eval(), tuple(example.values()))
    program = npu_compiler.compile(extraction.ir, device.target)
    weights = load_weights({name: tensor.numpy() for name, tensor in model.state_dict().items()}, program, device)
    executor = Executor(program, device)

    def result(given: dict[str, torch.Tensor]) -> NDArray[Any]:
        specs = program.input_specs
        inputs = {spec.name: NPUBuffer.from_numpy(given[spec.name].numpy(), device, spec) for spec in specs}
        (output,) = executor.run(inputs, weights).values()
        return output.to_numpy()

    return result


def bert_inputs(token: int = 7, segment: int = 1) -> dict[str, torch.Tensor]:
    ids, segments = torch.arange(LENGTH)[None].clone(), torch.zeros(1, LENGTH, dtype=torch.int64)
    ids[0, 4], segments[0, 2] = token, segment
    return {"input_ids": ids, "token_type_ids": segments}


@cache
def bert() -> tuple[nn.Module, Run]:
    model = BertLikeEmbeddings()
    return model, prepared(model, bert_inputs())


def test_a_bert_takes_the_ids_that_it_has() -> None:
    (model, result_of), inputs = bert(), bert_inputs(token=WORDS - 1)
    result = result_of(inputs)
    np.testing.assert_allclose(result, model(**inputs).detach().numpy(), atol=0.02)


@pytest.mark.parametrize("token", [10**8, WORDS, -1, 2**32 + 3])
def test_a_token_beyond_the_vocabulary_of_a_bert_is_told(token: int) -> None:
    told = rf"input 'input_ids': given the index {token} at position \[0, 4\], expected 0 to {WORDS - 1}, as 'embedding"
    with pytest.raises(InputError, match=told):
        bert()[1](bert_inputs(token))


def test_a_segment_that_there_is_none_of_is_told() -> None:
    with pytest.raises(InputError, match=r"'token_type_ids': given the index 2 at position \[0, 2\], expected 0 to 1"):
        bert()[1](bert_inputs(segment=2))


def test_an_id_beyond_a_small_table_is_told() -> None:
    example = {"input": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(InputError, match=r"given the index 5000 at position \[1\], expected 0 to 9"):
        run(nn.Embedding(10, 4), example, {"input": torch.tensor([1, 5000, 2])})


def test_a_position_beyond_the_cache_is_told() -> None:
    inputs = {"cache": torch.zeros(2, 2048, 8), "position": torch.tensor([3]), "new": torch.ones(2, 1, 8)}
    with pytest.raises(InputError, match=r"'position': given the index 5000 at position \[0\], expected 0 to 2047"):
        run(Cached(), inputs, {**inputs, "position": torch.tensor([5000])})
