"""Steps that are asked for one by one, whose tokens the host hands on: as looking at all logits has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import npu_compiler
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.errors import InputError
from npu_runtime import Device, Generator, NPUBuffer
from npu_text.host_decoding import decode_on_host
from npu_text.sampling import Sampling
from tests.support.decoders import Decoder
from tests.support.lane_choice import lane_of, wanted

PROMPT = [5, 6, 7, 8, 9]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 300},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.8},
]


def divided(qwen: Decoder, device: Device, can_run: Callable[..., bool]) -> Generator:
    """A model of which the device does what a callback says, of each node and the names of the step's logits."""
    plans = {}
    for name, step in GenerationSpec.load(qwen.folder).functions.items():
        ir, outputs = json.loads((qwen.folder / step.ir).read_text()), {step.logits}
        plans[name] = npu_compiler.partition(ir, partial(can_run, outputs=outputs), target=device.target)
    return Generator(qwen.folder, device, plans=plans)


@pytest.fixture(scope="module", params=["whole", "divided"])
def decoding_on_host(request: pytest.FixtureRequest, qwen: Decoder, device: Device) -> Generator:
    """Of a model that the device does all of, and of one that is partly done on the CPU."""
    if request.param == "whole":
        return Generator(qwen.folder, device, decoding=decode_on_host)
    return divided(qwen, device, lambda node, outputs: node["op_type"] != "aten.silu.default")


def check_text(generator: Generator, **options: Any) -> None:
    """Checks that each token is the reference's choice from the logits of those before it."""
    lane = lane_of(Sampling(**options))
    text = [token.id for token in generator.generate(PROMPT, 20, **options)]
    sequence, given = generator.model.begin(), PROMPT
    for token in text:
        logits = sequence.advance(given)
        row = (logits.to_numpy() if isinstance(logits, NPUBuffer) else logits).reshape(-1)
        assert wanted(row.astype(np.float32), lane, len(sequence.tokens)).is_met_by(token)
        given = [token]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_those_that_all_logits_give(decoding_on_host: Generator, options: dict[str, Any]) -> None:
    """Also at random, as the numbers of a seed are those of a position."""
    check_text(decoding_on_host, **options, **({"seed": 3} if options else {}))


def test_logits_of_the_cpu(qwen: Decoder, device: Device) -> None:
    """Where the last operation of a step runs there, the device chooses from what it is sent."""
    generator = divided(qwen, device, lambda node, outputs: not outputs & {out["name"] for out in node["outputs"]})
    assert isinstance(generator.model.begin().advance(PROMPT), np.ndarray)
    check_text(generator, temperature=1.0, top_p=0.9, seed=4)


def test_a_sequence_goes_on_in_between(generator: Generator) -> None:
    model = generator.model
    sequence, again = model.begin(), model.begin()
    tokens = decode_on_host(sequence, Sampling(), 20)(sequence.advance(PROMPT))
    text = [next(tokens) for _ in range(3)]
    sequence.advance([11, 12, 13])
    text.append(next(tokens))
    logits = again.advance([*PROMPT, *text[:2], 11, 12, 13, text[2]])
    assert sequence.tokens == again.tokens
    assert isinstance(logits, NPUBuffer)
    assert logits.to_numpy().argmax() == text[-1]


def test_a_full_cache_is_told(generator: Generator) -> None:
    sequence = generator.model.begin()
    tokens = decode_on_host(sequence, Sampling(), 20)(sequence.advance(PROMPT))
    with pytest.raises(InputError, match=f"given 1 tokens after {generator.model.spec.cache_length}, expected"):
        list(tokens)
    assert len(sequence.tokens) == generator.model.spec.cache_length
