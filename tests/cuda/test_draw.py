"""Kernels that draw tokens, a block or a cluster of blocks for a row, on the processor: as the reference has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cuda_compiler.draw
from cuda_compiler.artifact.extensions import cluster_of
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall
from npu_compiler.compiler import compile
from npu_compiler.graph.lane_tokens import Feature, lane_tokens_ir
from npu_runtime import Device, Executor
from npu_text.batching.engine import LaneSampling
from tests.support.host_kernels import HAS_COMPILER, run_plan_on_host
from tests.support.lane_choice import HOSTILE_LIMITS, HOSTILE_TOP_K, check_hostile, limits_of, random_words, wanted

SAMPLINGS = [
    LaneSampling(0.0),
    LaneSampling(1.0, seed=1),
    LaneSampling(0.8, top_p=0.9, seed=2),
    LaneSampling(1.0, top_k=20, top_p=0.8, seed=3),
    LaneSampling(1.5, min_p=0.1, seed=4),
    LaneSampling(1.0, top_k=700, seed=5),
    LaneSampling(1e-30, top_k=3, seed=6),
    LaneSampling(3.0, top_p=1e-9, seed=7),
    LaneSampling(0.1, top_k=4900, top_p=0.9, seed=8),
    LaneSampling(1.0, top_k=1 << 40, top_p=0.5, seed=9),
    *(LaneSampling(1.0, top_k=50 * count, top_p=0.3 + 0.15 * count, seed=count) for count in range(1, 5)),
]
VOCABULARY = 5000


def plan_of(rows: int, vocabulary: int) -> ExecutionPlan:
    ir = lane_tokens_ir((rows, vocabulary), "bfloat16", rows, {Feature.DRAWN})
    return compile(ir, "cuda", "bfloat16").main


def clusters_of(plan: ExecutionPlan, option: int) -> list[tuple[int, int, int]]:
    chosen = plan.resolved(lambda *_: option)
    return [cluster_of(call) for call in chosen.calls if isinstance(call, KernelCall)]


def inputs_of(samplings: list[LaneSampling], position: int) -> dict[str, NDArray[Any]]:
    return {
        "limits": limits_of(samplings),
        "top_k": np.array([s.top_k for s in samplings]),
        "words": np.array([random_words(s.seed, position) for s in samplings]),
    }


def tokens_on_host(
    plan: ExecutionPlan, option: int, arrays: dict[str, NDArray[Any]], folder: Path, backwards: bool = False
) -> NDArray[np.int64]:
    """What one way to draw gives on the processor."""
    given = {name: array.view(np.uint8) for name, array in arrays.items()}
    return run_plan_on_host(plan.resolved(lambda *_: option), given, folder, backwards)["tokens"].view(np.int64)


def spread(deviation: float, rng: np.random.Generator) -> NDArray[Any]:
    logits = (rng.standard_normal((len(SAMPLINGS), VOCABULARY)) * deviation).astype(ml_dtypes.bfloat16)
    logits[0, :9] = -np.inf
    return logits


def levels(_: float, rng: np.random.Generator) -> NDArray[Any]:
    """So many of them equal that no list holds them."""
    return rng.integers(0, 2, (len(SAMPLINGS), VOCABULARY)).astype(ml_dtypes.bfloat16)


def neighbours(deviation: float, rng: np.random.Generator) -> NDArray[Any]:
    """The likeliest of them side by side, so that one block lists more than the others."""
    logits = spread(deviation, rng)
    logits[:, 300:1200] = logits.max()
    return logits


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("option", [0, 1], ids=["cluster", "block"])
@pytest.mark.parametrize(
    ("make", "deviation", "backwards"),
    [
        (spread, 0.5, False),
        (spread, 0.5, True),
        (spread, 4.0, False),
        (levels, 1.0, False),
        (neighbours, 0.3, False),
        (neighbours, 0.3, True),
    ],
)
def test_draws_are_those_of_the_reference(
    make: Any,
    deviation: float,
    backwards: bool,
    option: int,
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_compiler.draw, "_LEAST_TOKENS", 64)
    logits, count = make(deviation, rng), len(SAMPLINGS)
    arrays = inputs_of(SAMPLINGS, 7) | {"logits": logits}
    plan = plan_of(count, VOCABULARY)
    assert clusters_of(plan, option) == [((8, 1, 1), (1, 1, 1))[option]]
    found = tokens_on_host(plan, option, arrays, tmp_path, backwards)
    for row, sampling, token in zip(logits, SAMPLINGS, found.tolist(), strict=True):
        expected = wanted(row.astype(np.float32), sampling, 7)
        assert expected.is_met_by(token), sampling


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("option", [0, 1], ids=["cluster", "block"])
def test_no_limit_leads_out_of_the_vocabulary(
    option: int, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_compiler.draw, "_LEAST_TOKENS", 64)
    count = len(HOSTILE_LIMITS)
    logits = spread(2.0, rng)[:count]
    words = np.array([random_words(row, 7) for row in range(count)])
    arrays = {"logits": logits, "limits": HOSTILE_LIMITS, "top_k": HOSTILE_TOP_K, "words": words}
    check_hostile(tokens_on_host(plan_of(count, VOCABULARY), option, arrays, tmp_path), logits)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "blocks"),
    [(1, 151_936, 8), (14, 151_936, 8), (15, 151_936, 4), (64, 151_936, 2), (65, 151_936, 2), (66, 151_936, 2)],
)
def test_idle_multiprocessors_share_rows(rows: int, vocabulary: int, blocks: int) -> None:
    assert clusters_of(plan_of(rows, vocabulary), 0) == [(blocks, 1, 1)]


@pytest.mark.parametrize(("rows", "vocabulary"), [(67, 151_936), (256, 151_936), (1, 4000), (1, 1)])
def test_a_block_draws_for_a_row_where_others_have_none_to_spare(rows: int, vocabulary: int) -> None:
    assert clusters_of(plan_of(rows, vocabulary), 0) == [(1, 1, 1)]


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_draws_of_a_large_vocabulary(rows: int, device: Device, rng: np.random.Generator) -> None:
    """By clusters of eight and of four blocks for a row, and by a block."""
    vocabulary, kinds = 151_936, [*SAMPLINGS, LaneSampling(0.8, top_p=0.95, seed=10), LaneSampling(1.0, top_k=5000)]
    samplings = [LaneSampling(**{**vars(kinds[row % len(kinds)]), "seed": row}) for row in range(rows)]
    program = compile(lane_tokens_ir((rows, vocabulary), "bfloat16", rows, {Feature.DRAWN}), "cuda", "bfloat16")
    executor = Executor(program, device)
    for position, deviation in enumerate([0.8, 4.0] * (5 if rows == 1 else 1)):
        if rows == 1:
            samplings = [kinds[position + 1]]
        logits = (rng.standard_normal((rows, vocabulary)) * deviation).astype(ml_dtypes.bfloat16)
        outputs = executor.run(inputs_of(samplings, position) | {"logits": logits})
        for row, sampling, token in zip(logits, samplings, outputs["tokens"].to_numpy().tolist(), strict=True):
            expected = wanted(row.astype(np.float32), sampling, position)
            assert expected.is_met_by(token), sampling
