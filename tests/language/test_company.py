"""Alone or in company: what a text becomes depends on nobody that runs beside it."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.frontend.decoder_request import BatchRequest
from npu_compiler.frontend.paged_decoder import PagedDecoder
from npu_runtime import Device
from npu_text.batching.driver import Driver
from npu_text.batching.engine import Chosen, LaneSampling
from npu_text.batching.paged_engine import PagedEngine
from npu_text.batching.texts import Event, Limits, TextRequest
from tests.support.decoders import VOCABULARY, config, import_transformers, make_decoder

REQUESTS, AT_ONCE = 200, 64


def requests() -> list[TextRequest]:
    """Greedy ones and such that draw, each with a seed, a length and ways of its own; all with log-probabilities."""
    made = []
    for number in range(REQUESTS):
        random = np.random.default_rng(number)
        prompt = tuple(random.integers(0, VOCABULARY, int(random.integers(1, 40))).tolist())
        sampling = LaneSampling(best=2)
        if number % 2:
            sampling = LaneSampling(
                temperature=float(random.uniform(0.5, 1.5)),
                top_k=int(random.choice([0, 5, 40])),
                top_p=float(random.choice([0.9, 1.0])),
                frequency_penalty=0.5 * (number % 3 == 0),
                logit_bias={7: 2.0} if number % 5 == 0 else {},
                seed=number,
                best=2,
            )
        made.append(TextRequest(prompt, int(random.integers(1, 8)), sampling))
    return made


def answers(engine: PagedEngine, asked: Sequence[TextRequest], at_once: int) -> list[list[Chosen]]:
    """What becomes of texts of which so many are open at a time."""
    free = threading.Semaphore(at_once)
    found: list[list[Chosen]] = [[] for _ in asked]
    finishes: list[str] = []

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            found[event.text.serial] += event.chosen
            if event.finish:
                finishes.append(event.finish)
                free.release()

    driver = Driver(engine, deliver, Limits(share=False))  # what texts share divides their prompts otherwise
    driver.start()
    for request in asked:
        assert free.acquire(timeout=60)
        driver.submit(request)
    for _ in range(at_once):
        assert free.acquire(timeout=60)
    driver.stop()
    assert finishes == ["length"] * len(asked)
    return found


@pytest.mark.parametrize("kv_cache", ["16", "int8"])
def test_texts_are_the_same_to_the_bit_one_by_one_and_many_at_a_time(
    kv_cache: str, tmp_path: Path, device: Device
) -> None:
    """By one function for all lanes. Tokens, and the logarithms of their probabilities."""
    batch = BatchRequest((8,), 32, chunks=(96,), packs={96: (2,)})
    decoder = make_decoder(tmp_path, "Qwen2", batch=batch, kv_cache=kv_cache)
    engine = PagedEngine(decoder.folder, device)
    asked = requests()
    assert answers(engine, asked, 1) == answers(engine, asked, AT_ONCE)


def _sums(lanes: int) -> list[tuple[Any, ...]]:
    """How kernels divide their sums, in 512 tokens of each of some prompts for a layer and a half of Qwen2.5-1.5B."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 2}
    model = import_transformers().AutoModelForCausalLM.from_config(config("Qwen2", **sizes), dtype=torch.bfloat16)
    inputs: dict[str, Any] = {name: torch.zeros(lanes, 512, dtype=torch.long) for name in ("tokens", "positions")}
    pools = tuple(torch.empty(1, dtype=torch.bfloat16).expand(33, 2, 128, 128) for _ in range(4))
    inputs |= {"tables": torch.zeros(lanes, 16, dtype=torch.int32), "pools": pools}
    ir = npu_compiler.extract(PagedDecoder(model, fills=True), inputs).ir
    plan = npu_compiler.compile(ir, target="cuda").functions["main"]
    kernels = [plan.kernels[call.kernel] for call in plan.calls if isinstance(call, KernelCall)]
    divisions = ("SPLITS", "ROW_THREADS", "BLOCK", "WARPGROUPS_L")
    found: list[tuple[Any, ...]] = [
        (k.entry, *re.findall(rf"#define ({'|'.join(divisions)}) (\S+)", k.text)) for k in kernels
    ]
    return [each for each in found if each[0] in ("matmul_bulk", "rows", "attention_prefill")]


def test_sums_are_divided_alike_however_many_prompts_are_filled_in() -> None:
    """By the compiler: the same numbers come of a prompt's tokens in any company."""
    alone = _sums(1)
    assert [entry for entry, *_ in alone].count("matmul_bulk") == 5
    assert ("SPLITS", "2") in [division for _, *divisions in alone for division in divisions]
    assert _sums(2) == alone
