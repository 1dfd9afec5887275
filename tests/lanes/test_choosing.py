"""The lanes of a batch choose as each would alone, and as the reference says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.graph.lane_tokens import Feature, lane_row_ir, lane_rows_ir, lane_tokens_ir, token_scores_ir
from npu_runtime import Device, NPUBuffer
from npu_text.batching.choosing import LaneChooser, LaneRow, accepted
from npu_text.batching.engine import Chosen, LaneSampling
from npu_text.batching.lane_sampling import check_sampling
from tests.support.lane_choice import allowed_bits, wanted
from tests.support.running import run_ir

VOCABULARY = 205
REQUESTS = [
    LaneSampling(),
    LaneSampling(1.0, seed=5, best=0),
    LaneSampling(0.7, top_k=20, seed=-7),
    LaneSampling(1.2, top_p=0.9, seed=2**70 + 3, best=5),
    LaneSampling(1.0, min_p=0.05, seed=1),
    LaneSampling(0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=9),
    LaneSampling(0.9, logit_bias={3: 5.0, 7: -100.0}, seed=10),
    LaneSampling(0.0, repetition_penalty=1.5, frequency_penalty=1.5, best=20),
]
LANES = len(REQUESTS)


def logits_of(rows: int, rng: np.random.Generator, kind: Any = ml_dtypes.bfloat16) -> NDArray[Any]:
    return (rng.standard_normal((rows, 1, VOCABULARY)) * 3).astype(kind)


def memory(device: Device, rows: int, kind: str = "bfloat16") -> NPUBuffer:
    return NPUBuffer.zeros((rows, 1, VOCABULARY), dtype=kind, device=device)


def write(buffer: NPUBuffer, logits: NDArray[Any]) -> None:
    with buffer.data.writing() as content:
        buffer.spec.encode_into(logits, content)


def prompts(rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(0, VOCABULARY, 7).tolist() for _ in range(LANES)]


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_lanes_choose_as_the_reference(kind: str, device: Device, rng: np.random.Generator) -> None:
    """Steps of some lanes, in any order, some with masks; penalties count what was chosen before."""
    chooser, buffer, given = LaneChooser(device, VOCABULARY, kind, LANES), memory(device, LANES, kind), prompts(rng)
    texts: list[list[int]] = [[] for _ in REQUESTS]
    for lane, sampling in enumerate(REQUESTS):
        chooser.begin(lane, sampling, given[lane])
    for position in range(7, 19 if kind == "bfloat16" else 11):
        logits = logits_of(LANES, rng, ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
        write(buffer, logits)
        lanes = rng.permutation(LANES)[: rng.integers(1, LANES + 1)].tolist()
        masks = [allowed_bits(rng.random(VOCABULARY) < 0.5) if rng.random() < 0.3 else None for _ in lanes]
        rows = [LaneRow(lane, position, mask) for lane, mask in zip(lanes, masks, strict=True)]
        for number, (row, chosen) in enumerate(zip(rows, chooser.choose(buffer, rows)(), strict=True)):
            own, sampling = logits[number, 0].astype(np.float32), REQUESTS[row.lane]
            expected = wanted(own, sampling, position, given[row.lane], texts[row.lane], row.mask)
            assert expected.is_met_by(chosen.token)
            texts[row.lane].append(chosen.token)
            check_scores(chosen, own, sampling)


def check_scores(chosen: Chosen, logits: NDArray[np.float32], sampling: LaneSampling) -> None:
    """The logarithms of probabilities are PyTorch's, of the model's own logits."""
    if sampling.best is None:
        assert chosen == Chosen(chosen.token)
        return
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    assert chosen.logprob == pytest.approx(float(expected[chosen.token]), abs=2e-5)
    assert len(chosen.best) == sampling.best
    order = np.argsort(-logits, kind="stable")[: sampling.best].tolist()
    assert [token for token, _ in chosen.best] == order
    assert [score for _, score in chosen.best] == pytest.approx(expected[order].tolist(), abs=2e-5)


def test_a_text_does_not_depend_on_who_shares_its_batch(device: Device, rng: np.random.Generator) -> None:
    """To the bit: alone, in another lane and row, among others and behind another text."""
    steps, given = [logits_of(LANES, rng) for _ in range(4)], prompts(rng)

    def texts(chooser: LaneChooser, requests: Sequence[int], lanes: Sequence[int], rows: int) -> list[list[Chosen]]:
        buffer, result = memory(device, rows), [[] for _ in requests]  # type: ignore[var-annotated]
        for request, lane in zip(requests, lanes, strict=True):
            chooser.begin(lane, REQUESTS[request], given[request])
        for position, logits in enumerate(steps):
            batch = np.zeros((rows, 1, VOCABULARY), ml_dtypes.bfloat16)
            batch[: len(requests)] = logits[list(requests)]
            write(buffer, batch)
            chosen = chooser.choose(buffer, [LaneRow(lane, position) for lane in lanes])()
            for text, each in zip(result, chosen, strict=True):
                text.append(each)
        return result

    together = texts(LaneChooser(device, VOCABULARY, "bfloat16", LANES), range(LANES), range(LANES), LANES)
    order = rng.permutation(LANES).tolist()
    mixed = texts(LaneChooser(device, VOCABULARY, "bfloat16", 11), order, rng.permutation(11)[:LANES].tolist(), LANES)
    assert [mixed[order.index(request)] for request in range(LANES)] == together
    alone = LaneChooser(device, VOCABULARY, "bfloat16", 2)
    for request in range(LANES):
        assert texts(alone, [request], [1], 1) == [together[request]]


def test_what_a_lane_had_is_gone_with_its_text(device: Device, rng: np.random.Generator) -> None:
    chooser, buffer = LaneChooser(device, VOCABULARY, "bfloat16", 2), memory(device, 2)
    write(buffer, logits_of(2, rng))
    rows = [LaneRow(0, 0), LaneRow(1, 0)]
    for lane in range(2):
        chooser.begin(lane, LaneSampling(), ())
    plain = chooser.choose(buffer, rows)()
    banned = {chosen.token: -1000.0 for chosen in plain}
    for lane in range(2):
        chooser.begin(lane, LaneSampling(logit_bias=banned, presence_penalty=2.0), [*banned])
    others = chooser.choose(buffer, rows)()
    assert not {chosen.token for chosen in others} & {*banned}
    chooser.begin(0, LaneSampling(), ())
    chooser.begin(1, LaneSampling(presence_penalty=1e-30, logit_bias={0: 0.0}), ())
    assert chooser.choose(buffer, rows)() == plain


def test_a_guess_is_rows_of_its_lane(device: Device, rng: np.random.Generator) -> None:
    chooser, buffer = LaneChooser(device, VOCABULARY, "bfloat16", 2), memory(device, 4)
    logits = logits_of(4, rng)
    write(buffer, logits)
    sampling = LaneSampling(1.0, top_p=0.9, seed=3)
    chooser.begin(1, sampling, ())
    chosen = chooser.choose(buffer, [LaneRow(1, position) for position in range(20, 24)])()
    single = memory(device, 1)
    for number in range(4):
        write(single, logits[number][None])
        assert chooser.choose(single, [LaneRow(1, 20 + number)])() == (chosen[number],)
    chooser.begin(0, LaneSampling(frequency_penalty=0.5), ())
    with pytest.raises(InputError, match="several rows for a lane with penalties"):
        chooser.choose(buffer, [LaneRow(0, 1), LaneRow(0, 2)])


def test_guesses_are_right_as_far_as_they_are_chosen() -> None:
    chosen = [4, 5, 6, 7]
    assert accepted([1], chosen[:1]) == 1
    assert accepted([1, 4, 5, 6], chosen) == 4
    assert accepted([1, 4, 9, 6], chosen) == 2
    assert accepted([1, 9, 5, 6], chosen) == 1


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, "given temperature=nan, expected 0"),
    ({"temperature": float("inf")}, "given temperature=inf"),
    ({"temperature": -0.5}, "given temperature=-0.5"),
    ({"top_k": -1}, "given top_k=-1"),
    ({"top_p": 0.0}, "given top_p=0.0, expected above 0"),
    ({"top_p": 1.5}, "given top_p=1.5"),
    ({"top_p": float("nan")}, "given top_p=nan"),
    ({"min_p": -0.1}, "given min_p=-0.1"),
    ({"repetition_penalty": 0.0}, "given repetition_penalty=0.0"),
    ({"repetition_penalty": 1e300}, "given repetition_penalty"),
    ({"presence_penalty": float("inf")}, "given presence_penalty=inf"),
    ({"frequency_penalty": float("nan")}, "given frequency_penalty=nan"),
    ({"logit_bias": {VOCABULARY: 1.0}}, f"given a logit_bias for token {VOCABULARY}, expected 0 to {VOCABULARY - 1}"),
    ({"logit_bias": {-1: 1.0}}, "given a logit_bias for token -1"),
    ({"logit_bias": {3: float("nan")}}, "given logit_bias=nan for token 3"),
    ({"best": 21}, "given best=21, expected None, or 0 to 20"),
    ({"best": -1}, "given best=-1"),
]


@pytest.mark.parametrize(("options", "words"), HOSTILE, ids=str)
def test_what_no_choice_can_be_made_by_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_sampling(LaneSampling(**options), VOCABULARY)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1.7e308])
@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64, -(10**40)])
def test_extremes_are_chosen_by(temperature: float, seed: int, device: Device, rng: np.random.Generator) -> None:
    chooser, buffer = LaneChooser(device, VOCABULARY, "float32", 1), memory(device, 1, "float32")
    logits = logits_of(1, rng, "float32")
    write(buffer, logits)
    chooser.begin(0, LaneSampling(temperature, top_k=1 << 70, top_p=5e-324, seed=seed), ())
    (chosen,) = chooser.choose(buffer, [LaneRow(0, 0)])()
    assert chosen.token == logits.argmax()


def test_wrong_calls_are_refused(device: Device) -> None:
    chooser, buffer = LaneChooser(device, VOCABULARY, "bfloat16", 2), memory(device, 2)
    with pytest.raises(InputError, match="given lane 2, expected 0 to 1"):
        chooser.begin(2, LaneSampling(), ())
    with pytest.raises(InputError, match="beyond the vocabulary"):
        chooser.begin(0, LaneSampling(), [VOCABULARY])
    bound = chooser.bind(buffer, ())
    for lanes, words in (([], "given 0 rows"), ([0] * 3, "given 3 rows for logits of 2")):
        with pytest.raises(InputError, match=words):
            bound.put(chooser.group(np.array(lanes, np.int64)), np.zeros(len(lanes), np.int64))
    with pytest.raises(InputError, match=r"given lanes \[-1\]"):
        chooser.group(np.array([-1]))
    with pytest.raises(InputError, match="bound without masks"), bound.masks():
        pass
    mask = np.zeros(7, np.uint32)
    wrong: Any
    for wrong in (np.zeros(6, np.uint32), np.zeros(7, np.int32), np.zeros((1, 7), np.uint32)):
        with pytest.raises(InputError, match=r"expected uint32 \[7\]"):
            chooser.choose(buffer, [LaneRow(0, 0, wrong)])
    with pytest.raises(DeviceError, match="no number"):
        chooser.choose(buffer, [LaneRow(0, 0, mask)])()


def test_scores_of_given_tokens_are_those_of_torch(device: Device, rng: np.random.Generator) -> None:
    logits = torch.from_numpy(logits_of(5, rng, "float32")[:, 0])
    tokens = torch.tensor([0, 204, 17, 17, 3])
    ir = token_scores_ir((5, VOCABULARY), "float32")
    logprobs, best, scores = run_ir(ir, {"logits": logits, "given": tokens}, device, "bfloat16")
    expected = torch.log_softmax(logits.double(), -1)
    np.testing.assert_allclose(logprobs, expected.gather(1, tokens[:, None])[:, 0], atol=2e-5)
    highest = expected.topk(20)
    np.testing.assert_array_equal(best, highest.indices)
    np.testing.assert_allclose(scores, highest.values, atol=2e-5)


@pytest.mark.parametrize(
    ("features", "launches"),
    [
        ((), (4, 4)),
        ((Feature.DRAWN,), (1, 1)),
        ((Feature.DRAWN, Feature.MASK), (2, 2)),
        ((Feature.DRAWN, Feature.MASK, Feature.BIAS, Feature.PENALTIES), (3, 3)),
        ((*Feature,), (10, 9)),
    ],
    ids=str,
)
def test_a_choice_is_few_launches(features: Sequence[Feature], launches: tuple[int, int]) -> None:
    """Masks, biases and penalties are one pass; counts are entered in place."""
    ir = lane_tokens_ir((8, 1, 151936), "bfloat16", 9, {*features})
    programs = [npu_compiler.compile(ir, target, "bfloat16") for target in ("metal", "cuda")]
    assert tuple(len(program.main.calls) for program in programs) == launches
    states = {"all_counts": "counts"} if Feature.PENALTIES in features else {}
    assert all(dict(program.main.state) == states for program in programs)


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_what_the_host_writes_is_brought_by_one_launch(target: str) -> None:
    program = npu_compiler.compile(lane_rows_ir(256, 257, {*Feature}), target, "bfloat16")
    assert len(program.main.calls) == 1


def test_a_row_of_a_lane_is_written_in_place() -> None:
    program = npu_compiler.compile(lane_row_ir(9, 151936, "int32"), "metal", "bfloat16")
    assert dict(program.main.state) == {"updated": "all"}
    assert len(program.main.calls) == 1


def test_a_request_changed_in_one_number_is_another(device: Device, rng: np.random.Generator) -> None:
    """Rows of one launch do not read each other's settings."""
    base = LaneSampling(1.0, top_k=0, seed=4)
    others = [base, replace(base, top_k=1), replace(base, top_p=1e-6), replace(base, min_p=1.0), replace(base, seed=5)]
    chooser, buffer = LaneChooser(device, VOCABULARY, "float32", 5), memory(device, 5, "float32")
    logits = np.tile(logits_of(1, rng, "float32") / 3, (5, 1, 1))
    write(buffer, logits)
    for lane, sampling in enumerate(others):
        chooser.begin(lane, sampling, ())
    tokens = [chosen.token for chosen in chooser.choose(buffer, [LaneRow(lane, 2) for lane in range(5)])()]
    assert tokens[1:4] == [int(logits[0].argmax())] * 3
    assert tokens == [wanted(logits[0, 0], sampling, 2).token for sampling in others]
