"""What the processor does for each step of a batch, and for each token that a server streams; needs no GPU.

`python -m benchmarks.serving_overhead --json benchmarks/results/serving_overhead.json`. Times are those of the
processor, of one thread: how much else runs does not count.

- `step`: the thread that drives a device. The engine is real, what it asks of the device takes no time: launches are
  counted and not run. Ahead of a launch the device waits; behind it, it works.
- `stream`: the server's event loop, with clients in another process that read streams. The engine is one that gives
  letters at a pace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from npu_compiler.frontend.decoder_request import BatchRequest
from npu_runtime import Device
from npu_runtime.backend import BoundPlan, Recording
from npu_text.batching.driver import Driver
from npu_text.batching.engine import LaneSampling
from npu_text.batching.paged_engine import PagedEngine
from npu_text.batching.texts import TextRequest

__all__ = ["main"]

_LANES = (1, 8, 64, 256)
_PAGE, _CONTEXT = 128, 2048
_PROMPT, _ANSWER, _ROUNDS = 500, 256, 3


class _Times(Recording):
    """Plans that are not run; when they were asked for, and waited for, in seconds of the thread."""

    taken: list[tuple[float, float, float, float]] = []  # noqa: RUF012 - of all of them, in order

    def launch(self) -> Callable[[], None]:
        asked = time.thread_time()

        def wait() -> None:
            begun = time.thread_time()
            self.taken.append((asked, left, begun, time.thread_time()))

        left = time.thread_time()
        return wait


def steps(lanes: int, engine: PagedEngine, sampling: LaneSampling) -> dict[str, Any]:
    """Microseconds of a step with so many texts, which begin and end all the while; half of the engine's own."""
    taken, ended = _Times.taken, threading.Event()
    count = lanes * _ROUNDS

    def deliver(events: Sequence[Any]) -> None:
        nonlocal count
        count -= sum(bool(event.finish) for event in events)
        if count <= 0:
            ended.set()

    driver = Driver(engine, deliver)
    for number in range(count):
        prompt = (number % 300, *range(_PROMPT - number % 7))
        driver.submit(TextRequest(tuple(t % 300 for t in prompt), _ANSWER, sampling, frozenset({301})))
    taken.clear()
    driver.start()
    ended.wait()
    driver.stop()
    turns = [
        (after[0] - before[3], before[2] - before[1], after[0] - before[0])
        for before, after in zip(taken, taken[1:], strict=False)
        if before[3] < after[0]
    ]
    ahead, beside, whole = ([1e6 * value for value in column] for column in zip(*turns, strict=True))
    return {
        "lanes": lanes,
        "steps": len(turns),
        "ahead of a launch": round(median(ahead), 1),
        "beside the device": round(median(beside), 1),
        "whole": round(median(whole), 1),
        "mean": round(mean(whole), 1),
    }


def make_engine(folder: Path, lanes: Sequence[int]) -> PagedEngine:
    """A real engine of a small model, whose launches are not run."""
    from tests.support.decoders import make_decoder

    pages = max(lanes) * (_CONTEXT // _PAGE)
    request = BatchRequest(tuple(lanes), _PAGE, pages=pages, chunks=(512,))
    decoder = make_decoder(folder, "Qwen2", _CONTEXT, batch=request, max_position_embeddings=_CONTEXT)
    device: Any = Device("software-metal")
    device.backend.record = lambda bound: _Times(bound)
    return PagedEngine(decoder.folder, device)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), _LANES)
        for sampling in (LaneSampling(), LaneSampling(0.7, top_p=0.9, seed=3)):
            for lanes in _LANES:
                engine.lanes = lanes
                print(steps(lanes, engine, sampling))
