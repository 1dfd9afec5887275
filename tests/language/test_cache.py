"""The cache: what a step writes to it, what it looks at, and prompts in chunks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_compiler.artifact.plan import Role
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_runtime import Device, Executor, Generator, NPUBuffer, load_weights
from npu_runtime.state_guard import exclusive_use
from npu_text.language_model import TokenSequence, plan_chunks
from tests.support.decoders import VOCABULARY, Decoder, make_decoder

TOKENS = np.random.default_rng(2).integers(0, VOCABULARY, 128).tolist()


def arrays(sequence: TokenSequence) -> list[NDArray[Any]]:
    return [cache.to_numpy() if isinstance(cache, NPUBuffer) else cache for cache in sequence.caches]


def logits(row: Any) -> NDArray[np.float32]:
    return np.asarray(row).astype(np.float32).reshape(-1)


def filled_with_garbage(generator: Generator) -> TokenSequence:
    """An empty sequence whose caches hold large numbers instead of zeros."""
    sequence = generator.model.begin()
    for cache in sequence.caches:
        assert isinstance(cache, NPUBuffer)
        noise = np.random.default_rng(3).normal(0, 1e4, cache.shape)
        with cache.data.writing() as memory:
            cache.spec.encode_into(noise.astype(np.float32), memory)
    return sequence


def test_a_decode_step_writes_the_new_token_and_nothing_else(generator: Generator) -> None:
    sequence = filled_with_garbage(generator)
    sequence.advance(TOKENS[:20])
    before = arrays(sequence)
    sequence.advance(TOKENS[20:21])
    for old, new in zip(before, arrays(sequence), strict=True):
        changed = np.unique(np.nonzero(old != new)[2])
        assert changed.tolist() == [20]


def test_the_plan_updates_every_cache_in_place(program: CompiledProgram, generator: Generator) -> None:
    for name, step in generator.model.spec.functions.items():
        plan = program.functions[name]
        assert set(plan.state) == {(updated, given) for given, updated in step.caches}, plan.notes
        written = {arg.buffer for call in plan.steps for arg in call.args if arg.writes}
        names = {plan.buffers[index].name for index in written if plan.buffers[index].role in (Role.INPUT, Role.OUTPUT)}
        assert names == {step.logits, *(given for given, _ in step.caches)}


def test_the_caches_stay_the_same_memory(generator: Generator) -> None:
    sequence = generator.model.begin()
    before = [cache.data for cache in sequence.caches if isinstance(cache, NPUBuffer)]
    sequence.advance(TOKENS[:5])
    sequence.advance(TOKENS[5:6])
    assert [cache.data for cache in sequence.caches if isinstance(cache, NPUBuffer)] == before


def test_no_token_sees_what_lies_behind_it(generator: Generator) -> None:
    """Neither what the caches held before, nor what the padding of a prefill of 16 puts behind a prompt of 5."""
    clean, dirty = generator.model.begin(), filled_with_garbage(generator)
    assert np.array_equal(logits(clean.advance(TOKENS[:5])), logits(dirty.advance(TOKENS[:5])))
    for token in TOKENS[5:30]:
        assert np.array_equal(logits(clean.advance([token])), logits(dirty.advance([token])))


def test_padding_leaves_no_trace(generator: Generator) -> None:
    """A padded prefill of 5 tokens is the start of a prefill of 16: places behind are overwritten before use."""
    padded, whole = generator.model.begin(), generator.model.begin()
    padded.advance(TOKENS[:5])
    padded.advance(TOKENS[5:16])
    whole.advance(TOKENS[:16])
    for a, b in zip(arrays(padded), arrays(whole), strict=True):
        np.testing.assert_allclose(a[:, :, :16].astype(float), b[:, :, :16].astype(float), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("sizes", [(48,), (16, 16, 16), (16, 1, 31), (5, 43), (40, 8)])
def test_chunks_give_what_the_whole_gives(generator: Generator, sizes: tuple[int, ...]) -> None:
    whole, chunked = generator.model.begin(), generator.model.begin()
    expected = logits(whole.advance(TOKENS[:48]))
    start = 0
    for size in sizes:
        given = logits(chunked.advance(TOKENS[start : start + size]))
        start += size
    assert np.corrcoef(given, expected)[0, 1] > 0.9995
    for a, b in zip(arrays(whole), arrays(chunked), strict=True):
        np.testing.assert_allclose(a.astype(float)[:, :, :48], b.astype(float)[:, :, :48], rtol=0.05, atol=0.05)


def test_a_prompt_may_fill_the_cache(qwen: Decoder, generator: Generator) -> None:
    """127 tokens after chunks of 48 and 48: the last 31 do not fit as a padded prefill of 48 at the end of 128."""
    given = logits(generator.model.begin().advance(TOKENS[:127]))
    assert np.corrcoef(given, qwen.logits(TOKENS[:127], torch.float32)[-1].numpy())[0, 1] > 0.999
    generation = generator.generate(TOKENS[:127])
    assert len(list(generation)) == 2
    assert generation.finish == "cache"


@given(st.data())
def test_chunks_cover_all_tokens_within_the_cache(data: st.DataObject) -> None:
    lengths = sorted({1, *data.draw(st.lists(st.integers(2, 64), max_size=4))})
    capacity = data.draw(st.integers(lengths[-1], 200))
    end = data.draw(st.integers(1, capacity))
    start = data.draw(st.integers(0, end - 1))
    covered = start
    for chunk in plan_chunks(start, end, lengths, capacity):
        assert 0 <= chunk.start <= covered < chunk.end <= end
        assert chunk.end - chunk.start <= chunk.length
        assert chunk.length in lengths
        assert chunk.start + chunk.length <= capacity
        covered = chunk.end
    assert covered == end


def test_the_rotary_angle_far_out(tmp_path: Path, device: Device) -> None:
    """Keys at position 30,000 turn by the angle that float32 gives; half precision has no such number."""
    decoder = make_decoder(
        tmp_path, "Qwen2", cache_length=32768, prefill=(), max_position_embeddings=32768, num_hidden_layers=1
    )
    sequence = Generator(decoder.folder, device).model.begin()
    sequence.tokens = [0] * 30000
    sequence.advance([7])
    keys = arrays(sequence)[0][0, :, 30000].astype(np.float32)
    layer = decoder.model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(decoder.model.model.embed_tokens(torch.tensor([7])))
        plain = layer.self_attn.k_proj(hidden).float().reshape(2, 2, 8).numpy()
    frequencies = decoder.model.model.rotary_emb.inv_freq.double().numpy()
    turned = (plain[:, 0] + 1j * plain[:, 1]) * np.exp(30000j * frequencies)
    expected = np.concatenate([turned.real, turned.imag], axis=1)
    np.testing.assert_allclose(keys, expected, rtol=0.02, atol=0.02)
    rounded = np.float64(ml_dtypes.bfloat16(30000))
    wrong = (plain[:, 0] + 1j * plain[:, 1]) * np.exp(1j * rounded * frequencies)
    assert not np.allclose(keys[:, :8], wrong.real, rtol=0.02, atol=0.02)


def test_weights_lie_on_the_device_once(qwen: Decoder, program: CompiledProgram, device: Device) -> None:
    path = qwen.folder / "model.safetensors"
    assert len(program.functions) == 3
    assert load_weights(path, program, device).nbytes <= 1.01 * path.stat().st_size


def test_a_cache_in_two_runs_at_once(
    qwen: Decoder, program: CompiledProgram, device: Device, generator: Generator
) -> None:
    executor, step = Executor(program, device, "decode"), generator.model.spec.functions["decode"]
    sequence = generator.model.begin()
    caches = {name: c for (name, _), c in zip(step.caches, sequence.caches, strict=True) if isinstance(c, NPUBuffer)}
    held, done = threading.Event(), threading.Event()

    def other_run() -> None:
        with exclusive_use(caches):
            held.set()
            done.wait()

    thread = threading.Thread(target=other_run)
    thread.start()
    held.wait()
    specs = {spec.name: spec for spec in executor.plan.inputs}
    numbers = {step.tokens: np.array([[1]]), step.positions: np.array([0])}
    inputs = caches | {name: NPUBuffer.from_numpy(array, device, specs[name]) for name, array in numbers.items()}
    weights = load_weights(qwen.folder / "model.safetensors", program, device)
    try:
        with pytest.raises(InputError, match="is being updated by another run"):
            executor.run(inputs, weights)
    finally:
        done.set()
        thread.join()
    executor.run(inputs, weights)
