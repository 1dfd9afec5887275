"""Choosing the tokens of a batch on a CUDA device: right by the numpy reference, and how long it takes.

python -m benchmarks.cuda_lanes [--check] [--time] [--vocabulary 151936]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import cuda_timing
from npu_compiler.graph.lane_tokens import Feature
from npu_runtime import Device, NPUBuffer
from npu_text.batching.choosing import LaneChooser, LaneRow
from npu_text.batching.engine import LaneSampling
from tests.support.lane_choice import allowed_bits, wanted

_LANES = (64, 8, 1, 256)
_REPEATED = 10  # choices of a graph that is timed
_NEAR = 1e-5  # of all weight: nearer to another token, rounding decides
_KINDS = {
    "highest": LaneSampling(),
    "temperature": LaneSampling(0.8),
    "top-k": LaneSampling(0.8, top_k=50),
    "top-p": LaneSampling(0.8, top_p=0.95),
    "top-k, top-p": LaneSampling(0.8, top_k=50, top_p=0.95),
    "min-p": LaneSampling(0.8, min_p=0.05),
    "penalties": LaneSampling(0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1),
    "bias": LaneSampling(0.8, top_k=50, top_p=0.95, logit_bias={5: 1.0}),
    "log-probabilities": LaneSampling(best=20),
}
_FLAT = ("temperature", "top-k", "top-p")
_KINDS["everything"] = replace(_KINDS["penalties"], min_p=0.01, logit_bias={5: 1.0}, best=20)


def peaked(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """Logits as language models give them: most far below a few, by a power of the rank."""
    ranks = np.argsort(rng.random(shape), axis=-1).astype(np.float32) + 1
    noise = rng.standard_normal(shape).astype(np.float32)
    return (20 - 1.6 * np.log(ranks) + 0.5 * noise).astype(np.float32)


def flat(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _bfloat16(array: NDArray[np.float32]) -> NDArray[np.float32]:
    return torch.from_numpy(array).bfloat16().float().numpy()


def _given(device: Device, array: NDArray[np.float32]) -> NPUBuffer:
    lanes, vocabulary = array.shape
    buffer = NPUBuffer.zeros((lanes, 1, vocabulary), dtype="bfloat16", device=device)
    return NPUBuffer.from_numpy(array.reshape(lanes, 1, vocabulary), device, spec=buffer.spec)


def _random_sampling(rng: np.random.Generator, vocabulary: int) -> LaneSampling:
    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    sampling = LaneSampling(
        temperature=one_of(0.0, 0.3, 0.7, 1.0, 1.5, 20.0),
        top_k=one_of(0, 0, 1, 5, 50, 1500, vocabulary),
        top_p=one_of(1.0, 1.0, 0.95, 0.5, 0.999, 0.01),
        min_p=one_of(0.0, 0.0, 0.05, 0.001),
        seed=int(rng.integers(1 << 62)),
    )
    if rng.random() < 0.3:
        sampling = replace(sampling, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    if rng.random() < 0.3:
        sampling = replace(sampling, logit_bias={int(token): 3.0 for token in rng.integers(0, vocabulary, 4)})
    return sampling


def check(device: Device, vocabulary: int, lanes: int, rounds: int, make: Callable[..., Any], masked: bool) -> str:
    """Compares random requests with the reference."""
    rng = np.random.default_rng(vocabulary + lanes)
    chooser = LaneChooser(device, vocabulary, "bfloat16", lanes)
    right = near = wrong = 0
    examples: list[str] = []
    for _ in range(rounds):
        logits = _bfloat16(make((lanes, vocabulary), rng))
        samplings = [_random_sampling(rng, vocabulary) for _ in range(lanes)]
        prompts = [rng.integers(0, vocabulary, 20).tolist() for _ in range(lanes)]
        for lane, (sampling, prompt) in enumerate(zip(samplings, prompts, strict=True)):
            chooser.begin(lane, sampling, prompt)
        masks = [allowed_bits(rng.random(vocabulary) < 0.3) if masked and lane % 2 else None for lane in range(lanes)]
        order = rng.permutation(lanes).tolist()
        rows = [LaneRow(lane, int(rng.integers(1000)), masks[lane]) for lane in order]
        chosen = chooser.choose(_given(device, logits), rows)()
        for number, (row, found) in enumerate(zip(rows, chosen, strict=True)):
            expected = wanted(logits[number], samplings[row.lane], row.position, prompts[row.lane], (), row.mask)
            if found.token == expected.token:
                right += 1
            elif min(expected.margin, expected.limit_margin) < _NEAR:
                near += 1
            else:
                wrong += 1
                examples.append(f"{samplings[row.lane]} {found.token} {expected}")
    for example in examples[:3]:
        print("  wrong:", example)
    return f"{make.__name__} V={vocabulary} lanes={lanes}: right {right}, near ties {near}, wrong {wrong}"


def check_company(device: Device, vocabulary: int) -> str:
    """Each lane alone, and in a batch in another order."""
    rng = np.random.default_rng(3)
    lanes = 16
    logits = _bfloat16(peaked((lanes, vocabulary), rng))
    samplings = [replace(_random_sampling(rng, vocabulary), logit_bias={}) for _ in range(lanes)]
    together, alone = (LaneChooser(device, vocabulary, "bfloat16", lanes) for _ in range(2))
    for lane, sampling in enumerate(samplings):
        together.begin(lane, sampling, [lane])
    order = rng.permutation(lanes).tolist()
    rows = [LaneRow(lane, 7) for lane in order]
    found = together.choose(_given(device, logits[order]), rows)()
    equal = 0
    for row, chosen in zip(rows, found, strict=True):
        alone.begin(0, samplings[row.lane], [row.lane])
        (by_itself,) = alone.choose(_given(device, logits[row.lane][None]), [LaneRow(0, 7)])()
        equal += by_itself.token == chosen.token
    return f"alone and in company: {equal} of {lanes} equal"


def microseconds(device: Device, logits: NPUBuffer, sampling: LaneSampling, drawn: bool = False) -> float:
    """Of one choice for all rows."""
    lanes, _, vocabulary = logits.shape
    chooser = LaneChooser(device, vocabulary, "bfloat16", lanes)
    for lane in range(lanes):
        chooser.begin(lane, replace(sampling, seed=lane), list(range(20)))
    group = chooser.group(np.arange(lanes))
    bound = chooser.bind(logits, group.features(False) | ({Feature.DRAWN} if drawn else set()))
    bound.put(group, np.full(lanes, 9))
    recording = device.backend.record([*bound.plans] * _REPEATED)
    replay = partial(recording.replay, sync=False, stream=None)
    taken = cuda_timing.milliseconds(replay, device.backend.stream.ptr)  # type: ignore[attr-defined]
    recording.launch()()
    return 1000 * taken / _REPEATED


def profile(device: Device, vocabulary: int, lanes: int) -> None:
    """Prints microseconds of each launch, events and their gaps included."""
    array = np.resize(_bfloat16(peaked((16, vocabulary), np.random.default_rng(0))), (lanes, vocabulary))
    given = _given(device, array)
    for name in ("highest", "top-k", "top-p", "everything"):
        chooser = LaneChooser(device, vocabulary, "bfloat16", lanes)
        for lane in range(lanes):
            chooser.begin(lane, replace(_KINDS[name], seed=lane), list(range(20)))
        group = chooser.group(np.arange(lanes))
        bound = chooser.bind(given, group.features(False))
        bound.put(group, np.full(lanes, 9))
        prepared = bound.plans[-1].plan
        taken = np.median([prepared.run_timed(bound.plans[-1].buffers) for _ in range(7)], axis=0) * 1e6
        print(f"{lanes} lanes, {name}:", " | ".join(f"{each:.1f}" for each in taken), flush=True)


def _peers(array: NDArray[np.float32]) -> dict[str, float]:
    """PyTorch's kernels for parts of the same work, each captured."""
    logits = torch.from_numpy(array).cuda().bfloat16()

    def nucleus() -> torch.Tensor:
        ordered, places = torch.softmax(logits.float() / 0.8, -1).sort(-1, descending=True)
        kept = torch.where(ordered.cumsum(-1) - ordered < 0.95, ordered, 0)
        return places.gather(-1, torch.multinomial(kept, 1))

    def sampled() -> torch.Tensor:
        return torch.multinomial(torch.softmax(logits.float() / 0.8, -1), 1)

    ways = {"argmax": lambda: logits.argmax(-1), "multinomial": sampled, "sort, top-p": nucleus}
    return {f"torch {name}": 1000 * cuda_timing.milliseconds(way) for name, way in ways.items()}


def time_all(device: Device, vocabulary: int, lanes: Sequence[int]) -> None:
    """Prints microseconds of a choice, by what is asked for and how many lanes there are."""
    rng = np.random.default_rng(0)
    for count in lanes:
        for make in (peaked, flat):
            array = np.resize(_bfloat16(make((min(count, 16), vocabulary), rng)), (count, vocabulary))
            given = _given(device, array)
            kinds = _KINDS if make is peaked else {name: _KINDS[name] for name in _FLAT}
            print(f"{count} lanes, {make.__name__}, µs:", flush=True)
            for name, sampling in kinds.items():
                print(f"  {name:22s} {microseconds(device, given, sampling):7.1f}", flush=True)
            print(f"  {'highest, by a draw':22s} {microseconds(device, given, LaneSampling(), True):7.1f}", flush=True)
            for name, taken in _peers(array).items() if make is peaked else ():
                print(f"  {name:22s} {taken:7.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the reference")
    parser.add_argument("--time", action="store_true", help="measure")
    parser.add_argument("--profile", action="store_true", help="measure each launch")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--lanes", type=int, nargs="*", default=_LANES)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = Device(args.device)
    if args.check:
        print(check_company(device, args.vocabulary), flush=True)
        for vocabulary, lanes, rounds in ((1000, 64, 3), (20011, 16, 2), (args.vocabulary, 16, 1)):
            for make in (peaked, flat):
                print(check(device, vocabulary, lanes, rounds, make, masked=make is flat), flush=True)
    if args.profile:
        profile(device, args.vocabulary, args.lanes[0])
    if args.time:
        time_all(device, args.vocabulary, args.lanes)


if __name__ == "__main__":
    main()
