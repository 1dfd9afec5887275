"""What a server gives many clients, who are locust's: tokens a second, and the times that they wait.

``python -m benchmarks.serving_load --json benchmarks/results/serving_load.json`` serves a small Qwen2 with random
weights; ``python -m benchmarks.serving_load qwen --device cuda --clients 64 --prompt 512 --answer 256 --processes 8
--requests 10000`` Qwen2.5-1.5B by its configuration, or what ``npu extract-llm --lanes`` made in that folder. Prompts
are random tokens, so that none begins as another does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import numpy as np

from benchmarks.serving_model import make_qwen, make_small
from benchmarks.serving_wear import answer, kill, wear
from npu_compiler.artifact.generation_spec import FILE_NAME, GenerationSpec
from npu_compiler.integers import ceil_div
from tests.support.serving import MODEL

__all__ = ["Load", "ask", "main", "measure", "span_answered", "throughput"]

_ROUNDS = 5  # of steps; others may have the machine meanwhile
_ROOT = Path(__file__).parents[1]
_LATER = "all clients, each answered before: tokens/s"


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Attributes:
        clients: How many there are at once.
        prompt, answer: Tokens of each.
        seconds: For which new texts are asked for.
        processes: In which the clients run.
        requests: That are sent to see what they leave behind.
    """

    clients: int = 16
    prompt: int = 32
    answer: int = 64
    seconds: float = 15.0
    processes: int = 1
    requests: int = 0


def measure(folder: Path, device: str | None, load: Load) -> Iterator[dict[str, Any]]:
    """Serves a folder, and asks: one client, all of them, and as many requests as are half of what all of them got.

    Figures come as they are measured, so that a run that is stopped leaves what it has.

    Args:
        folder: What ``npu extract-llm --lanes`` made, with a tokenizer.
        device: Where to serve it; the best of this machine when omitted.
        load: What clients ask for.
    """
    devices = device.split(",") if device else [None]
    most = ceil_div(load.clients, len(devices))
    alone_here = _apart(_engine_figures, folder, devices[0], most, load)
    vocabulary, steps = GenerationSpec.load(folder).vocabulary, alone_here["decode step of lanes, ms"]
    yield {
        "machine": alone_here.pop("machine") | {"devices": len(devices), "date": f"{date.today()}"},
        "clients": load.clients,
        "prompt, tokens": load.prompt,
        "answer, tokens": load.answer,
    } | alone_here
    found: dict[str, Any] = {}
    with _server(folder, device) as (url, process):
        for figures in _asked(url, vocabulary, load, steps[1]):
            found |= figures
            yield figures
        if load.requests:
            yield {"wear": wear(url, process.pid, load.requests)}
        said = answer(url, vocabulary)
        yield {"killed under load: clients that are told": kill(url, process, vocabulary, load.clients)}
    started = time.perf_counter()
    with _server(folder, device) as (url, _):
        same = answer(url, vocabulary) == said
        yield {
            "killed under load: answers again after, s": time.perf_counter() - started,
            "killed under load: answers the same again": same,
        }
    after = _apart(_all_lanes_step, folder, devices[0], max(steps), load)
    alone = 1000 * max(steps) * len(devices) / ((steps[max(steps)] + after) / 2)  # the device's pace changes with time
    yield {
        "decode step of all lanes after the load, ms": after,
        "all clients over the decode step alone": found["all clients, tokens/s"] / alone,
        "all clients, each answered before: over the decode step alone": found[_LATER] / alone,
    }


def _apart(call: Callable[..., Any], *arguments: object) -> Any:
    """What a call gives in another process, which then gives its memory on the device back."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def _asked(url: str, vocabulary: int, load: Load, step: float) -> Iterator[dict[str, Any]]:
    """What clients got; `step` is what one text's takes, in milliseconds."""
    ask(url, vocabulary, load, load.clients, 2.0)  # what is made when it is first asked for
    alone = ask(url, vocabulary, load, 1, load.seconds)
    one = throughput(alone)
    between = [(record["end"] - record["first"]) / (record["tokens"] - 1) for record in alone]
    yield {
        "one client, tokens/s": one,
        "one client: time for a token over the decode step": 1000 * median(between) / step,
        "one client: first token, ms": 1000 * median(record["first"] - record["asked"] for record in alone),
    }
    records = ask(url, vocabulary, load, load.clients, load.seconds)
    most, later = throughput(records), throughput(records, span_answered(records))
    yield {
        "all clients, tokens/s": most,
        "all clients over one": most / one,
        _LATER: later,
    }
    period = 2 * load.clients * load.answer / most
    half = ask(url, vocabulary, load, load.clients, load.seconds + 2 * period, period)
    start = min(record["asked"] for record in half) + 2 * period  # until then there are fewer texts than later
    share = throughput(half, (start, max(record["asked"] for record in half))) / most
    half = [record for record in half if record["asked"] >= start]
    first = [1000 * (record["first"] - record["asked"]) for record in half]
    yield {
        "half load: requests": len(half),
        "half load: tokens/s over all clients'": share,
        "half load: first token p50, ms": float(np.percentile(first, 50)),
        "half load: first token p99, ms": float(np.percentile(first, 99)),
    }


def _engine_figures(folder: Path, device: str | None, clients: int, load: Load) -> dict[str, Any]:
    """What steps and chunks take, and what all clients would get without a server; to be called in another process."""
    from benchmarks.resnet import machine_figures
    from npu_runtime import Device
    from npu_text.batching.paged_engine import PagedEngine

    opened = Device(device)
    engine = PagedEngine(folder, opened)
    batch, most = engine.spec.batch, min(clients, engine.lanes)
    assert batch is not None
    sizes = sorted({1, most, *(lanes for lanes in batch.decode if lanes < most)})
    figures: dict[str, Any] = {
        "machine": {name: machine_figures(opened)[name] for name in ("processor", "cores", "device")},
        "decode step of lanes, ms": {lanes: 1000 * _lanes_seconds(engine, lanes, load) for lanes in sizes},
        "chunk of tokens, ms": {count: 1000 * _chunk_seconds(engine, count) for count in engine.chunks},
        "chunks of prompts together, ms": {
            f"{together} x {count}": 1000 * _chunk_seconds(engine, count, together)
            for count in engine.chunks
            for together in engine.packs.get(count, ())
        },
    }
    if most > 1:
        figures |= _together(engine, most, load)
    return figures | {"without a server, tokens/s": _driver_rate(engine, most, load)}


def _all_lanes_step(folder: Path, device: str | None, lanes: int, load: Load) -> float:
    """What a step of all lanes takes, in milliseconds; to be called in another process."""
    from npu_runtime import Device
    from npu_text.batching.paged_engine import PagedEngine

    return 1000 * _lanes_seconds(PagedEngine(folder, Device(device)), lanes, load)


def _chunk_seconds(engine: Any, tokens: int, together: int = 1) -> float:
    """What so many tokens of some prompts take, the texts' first."""
    from npu_text.batching.engine import LaneSampling, Prefill

    each, parts = ceil_div(tokens, engine.page_tokens), []
    for lane in range(together):
        engine.begin(lane, LaneSampling(), [1])
        parts.append(Prefill(lane, [1] * tokens, 0, tuple(range(lane * each, (lane + 1) * each))))
    return _median_seconds(lambda: engine.prefill(*parts)())


def _together(engine: Any, lanes: int, load: Load) -> dict[str, float]:
    """What the longest chunk and a step take while all lanes but its own go on: one of each, and one after another."""
    from npu_text.batching.engine import LaneSteps, Prefill

    each = ceil_div(load.prompt + load.answer, engine.page_tokens)
    pages = [tuple(range(lane * each, (lane + 1) * each)) for lane in range(lanes)]
    tokens = min(engine.chunks[-1], load.prompt)
    part = Prefill(lanes - 1, [1] * tokens, 0, pages[-1])
    numbers = np.arange(lanes - 1)
    positions = np.full(lanes - 1, load.prompt + load.answer // 2)
    steps = LaneSteps(numbers, np.ones(lanes - 1, np.int64), positions, pages[:-1])

    def turn() -> None:
        filled, stepped = engine.prefill(part), engine.step(steps)
        filled()
        stepped()

    one_of_each = _median_seconds(turn)
    filling, ended = [engine.prefill(part), engine.prefill(part)], 0
    seconds: list[float] = []
    started = time.perf_counter()
    while ended < 20:
        seconds.append(_seconds(lambda: engine.step(steps)()))
        if filling[0].is_done():
            filling.pop(0)()
            filling.append(engine.prefill(part))
            ended += 1
    chunk = (time.perf_counter() - started) / ended
    for fill in filling:
        fill()
    return {
        "longest chunk beside a step of all lanes, ms": 1000 * one_of_each,
        "while both go on: a step, ms": 1000 * median(seconds),
        "while both go on: a chunk, ms": 1000 * chunk,
    }


def _median_seconds(call: Callable[[], object]) -> float:
    return median(_seconds(call) for _ in range(20))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _driver_rate(engine: Any, clients: int, load: Load) -> float:
    """Tokens a second of as many texts, a new one for each that ends, whose news nobody writes down."""
    from npu_text.batching.driver import Driver
    from npu_text.batching.texts import Event, TextRequest

    generator = np.random.default_rng(0)
    ended: SimpleQueue[float] = SimpleQueue()

    def submit() -> None:
        prompt = generator.integers(0, engine.vocabulary, load.prompt).tolist()
        driver.submit(TextRequest(tuple(prompt), load.answer))

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            if event.finish == "length":
                ended.put(time.perf_counter())
                submit()

    driver = Driver(engine, deliver)
    for _ in range(clients):
        submit()
    driver.start()
    times = [ended.get() for _ in range(5 * clients)]
    driver.stop()
    rounds = [later - sooner for sooner, later in zip(times[clients:], times[2 * clients :], strict=False)]
    return clients * load.answer / median(rounds)  # of as many texts as there are clients


def _lanes_seconds(engine: Any, lanes: int, load: Load) -> float:
    """What a step takes of so many lanes, in the middle of the answers."""
    from npu_text.batching.engine import LaneSampling, LaneSteps, Prefill

    start = load.prompt + load.answer // 2  # rounds write the same places again
    each = ceil_div(load.prompt + load.answer, engine.page_tokens)
    pages = [tuple(range(lane * each, (lane + 1) * each)) for lane in range(lanes)]
    for lane in range(lanes):
        engine.begin(lane, LaneSampling(), [1])
        for at in range(0, start, engine.chunks[-1]):
            part = [1] * min(engine.chunks[-1], start - at)
            engine.prefill(Prefill(lane, part, at, pages[lane]))()
    medians, numbers = [], np.arange(lanes)
    for _ in range(_ROUNDS):
        tokens, seconds = np.ones(lanes, np.int64), []
        for position in range(start, load.prompt + load.answer):
            began = time.perf_counter()
            tokens = engine.step(LaneSteps(numbers, tokens, np.full(lanes, position), pages))().tokens
            seconds.append(time.perf_counter() - began)
        medians.append(median(seconds))
    return min(medians)


@contextmanager
def _server(folder: Path, device: str | None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`npu serve` as users start it: its address, and its process."""
    command = [sys.executable, "-m", "npu_cli", "serve", str(folder), "--port", "0", "--name", MODEL]
    command += ["--device", device] if device else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0], server
        finally:
            server.terminate()
            server.wait(60)


def ask(
    url: str, vocabulary: int, load: Load, clients: int, seconds: float, period: float | None = None
) -> list[dict[str, Any]]:
    """Has clients ask for texts, each again as soon as it was answered.

    Args:
        url: Of the server.
        vocabulary: How many tokens there are.
        load: What is asked for.
        clients: How many there are.
        seconds: For which they ask.
        period: Seconds between two requests of a client, on average and at random; None for no pause.

    Returns:
        For each answer its ``client``, when it was ``asked`` for, when the ``first`` token and the ``end`` came, in
        seconds, and how many ``tokens`` it has.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = {"model": MODEL, "vocabulary": vocabulary, "prompt": load.prompt, "answer": load.answer}
        asked |= {"records": str(Path(folder) / "records"), "period": period}
        command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("serving_locustfile.py"))]
        command += ["--headless", "--host", url, "--users", str(clients), "--spawn-rate", str(clients)]
        command += ["--run-time", f"{seconds:.0f}s", "--stop-timeout", "600", "--loglevel", "WARNING", "--only-summary"]
        if load.processes > 1 and clients > 1:
            command += ["--processes", str(load.processes)]
        environment = os.environ | {"NPU_LOAD": json.dumps(asked)}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"locust ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return [json.loads(line) for file in Path(folder).glob("records-*") for line in file.read_text().splitlines()]


def throughput(records: Sequence[dict[str, Any]], span: tuple[float, float] | None = None) -> float:
    """Tokens a second between two times; while all clients asked where none are given."""
    start, end = span or _all_asked(records)
    tokens = 0.0
    for record in records:
        share = min(record["end"], end) - max(record["first"], start)
        tokens += record["tokens"] * max(0.0, share) / (record["end"] - record["first"])
    return tokens / (end - start) if end > start else float("nan")


def _all_asked(records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """From when until when each client had a request under way, or had just been answered."""
    clients = _by_client(records)
    start = max(min(record["asked"] for record in own) for own in clients)
    return start, min(max(record["end"] for record in own) for own in clients)


def span_answered(records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The same, from when each client had been answered: what all ask for at once at first is not counted, as it is
    not without a server."""
    clients = _by_client(records)
    start = max(min(record["end"] for record in own) for own in clients)
    return start, max(start, _all_asked(records)[1])


def _by_client(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    clients: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        clients[record["client"]].append(record)
    return list(clients.values())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_load")
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="what to serve; Qwen2.5-1.5B is made where it holds no model; default: a small one, for this run",
    )
    parser.add_argument("--device", help="as for npu serve")
    parser.add_argument("--clients", type=int, default=Load.clients)
    parser.add_argument("--prompt", type=int, default=Load.prompt, help="tokens of each")
    parser.add_argument("--answer", type=int, default=Load.answer, help="tokens of each")
    parser.add_argument("--seconds", type=float, default=Load.seconds, help="of each of three loads")
    parser.add_argument("--processes", type=int, default=1, help="in which the clients run")
    parser.add_argument("--requests", type=int, default=0, help="to send beside, to see what they leave behind")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    load = Load(args.clients, args.prompt, args.answer, args.seconds, args.processes, args.requests)
    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place)
        if args.folder is None:
            make_small(folder, load.clients)
        elif not (folder / FILE_NAME).exists():
            make_qwen(folder)
        figures: dict[str, Any] = {}
        for more in measure(folder.resolve(), args.device, load):
            figures |= more
            for name, value in more.items():
                print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
