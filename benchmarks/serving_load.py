"""What a server gives many clients, who are locust's: tokens a second, and the times that they wait.

``python -m benchmarks.serving_load --json benchmarks/results/serving_load_software_gpu.json`` serves a small Qwen2 with
random weights; ``python -m benchmarks.serving_load FOLDER --device cuda --clients 64 --prompt 512 --answer 256
--processes 8`` what ``npu extract-llm --lanes`` made. Prompts are random tokens, so that none begins as another does.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.integers import ceil_div
from tests.support.serving import MODEL

__all__ = ["Load", "ask", "main", "measure", "throughput"]

_ROUNDS = 5  # of steps; others may have the machine meanwhile
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Attributes:
        clients: How many there are at once.
        prompt, answer: Tokens of each.
        seconds: For which new texts are asked for.
        processes: In which the clients run.
    """

    clients: int = 16
    prompt: int = 32
    answer: int = 64
    seconds: float = 15.0
    processes: int = 1


def measure(folder: Path, device: str | None, load: Load) -> dict[str, Any]:
    """Serves a folder, and asks: one client, all of them, and as many requests as are half of what all of them got.

    Args:
        folder: What ``npu extract-llm --lanes`` made, with a tokenizer.
        device: Where to serve it; the best of this machine when omitted.
        load: What clients ask for.
    """
    devices = device.split(",") if device else [None]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # which gives its memory on the device back
        alone_here = pool.submit(
            _engine_figures, folder, devices[0], ceil_div(load.clients, len(devices)), load
        ).result()
    vocabulary = GenerationSpec.load(folder).vocabulary
    with _server(folder, device) as url:
        ask(url, vocabulary, load, load.clients, 2.0)  # what is made when it is first asked for
        alone = ask(url, vocabulary, load, 1, load.seconds)
        one = throughput(alone)
        most = throughput(ask(url, vocabulary, load, load.clients, load.seconds))
        period = 2 * load.clients * load.answer / most
        half = ask(url, vocabulary, load, load.clients, load.seconds + period, period)
    first = sorted(record["first"] - record["asked"] for record in half)
    between = [(record["end"] - record["first"]) / (record["tokens"] - 1) for record in alone]
    single, many, lanes = (alone_here[name] for name in ("one lane, s", "all lanes, s", "lanes"))
    return {
        "machine": alone_here["machine"] | {"devices": len(devices), "date": f"{date.today()}"},
        "clients": load.clients,
        "prompt, tokens": load.prompt,
        "answer, tokens": load.answer,
        "decode step of one lane, ms": 1000 * single,
        f"decode step of {lanes} lanes, ms": 1000 * many,
        "one client, tokens/s": one,
        "all clients, tokens/s": most,
        "all clients over one": most / one,
        "all clients over the decode step alone": most * many / (lanes * len(devices)),
        "one client: time for a token over the decode step": median(between) / single,
        "half load: requests": len(half),
        "half load: first token p50, ms": 1000 * float(np.percentile(first, 50)),
        "half load: first token p99, ms": 1000 * float(np.percentile(first, 99)),
    }


def _engine_figures(folder: Path, device: str | None, clients: int, load: Load) -> dict[str, Any]:
    """What a step takes of one lane, and of as many as there are clients or lanes; to be called in another process."""
    from benchmarks.resnet import machine_figures
    from npu_runtime import Device
    from npu_text.batching.paged_engine import PagedEngine

    opened = Device(device)
    engine = PagedEngine(folder, opened)
    lanes = min(clients, engine.lanes)
    return {
        "machine": {name: machine_figures(opened)[name] for name in ("processor", "cores", "device")},
        "lanes": lanes,
        "one lane, s": _lanes_seconds(engine, 1, load),
        "all lanes, s": _lanes_seconds(engine, lanes, load),
    }


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
            engine.prefill(Prefill(lane, part, at, pages[lane], choose=False))()
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
def _server(folder: Path, device: str | None) -> Iterator[str]:
    """`npu serve` as users start it; its address."""
    command = [sys.executable, "-m", "npu_cli", "serve", str(folder), "--port", "0", "--name", MODEL]
    command += ["--device", device] if device else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
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
        rate = clients if period is None else clients / period
        command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("serving_locustfile.py"))]
        command += ["--headless", "--host", url, "--users", str(clients), "--spawn-rate", str(rate)]
        command += ["--run-time", f"{seconds:.0f}s", "--stop-timeout", "600", "--loglevel", "WARNING", "--only-summary"]
        if load.processes > 1 and clients > 1:
            command += ["--processes", str(load.processes)]
        environment = os.environ | {"NPU_LOAD": json.dumps(asked)}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"locust ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return [json.loads(line) for file in Path(folder).glob("records-*") for line in file.read_text().splitlines()]


def throughput(records: Sequence[dict[str, Any]]) -> float:
    """Tokens a second while all clients had a text open."""
    clients: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        clients[record["client"]].append(record)
    start: float = max(min(record["asked"] for record in own) for own in clients.values())
    end: float = min(max(record["end"] for record in own) for own in clients.values())
    tokens = 0.0
    for record in records:
        share = min(record["end"], end) - max(record["first"], start)
        tokens += record["tokens"] * max(0.0, share) / (record["end"] - record["first"])
    return tokens / (end - start)


@contextmanager
def _small_model(clients: int, context: int) -> Iterator[Path]:
    """A folder with a Qwen2 of two layers, and a tokenizer whose tokens are bytes."""
    from npu_compiler.frontend.decoder_request import BatchRequest
    from npu_compiler.frontend.language_model import extract_language_model
    from tests.support.decoders import config
    from tests.support.serving import make_tokenizer

    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place) / "source", Path(place) / "model"
        config("Qwen2").save_pretrained(source)
        batch = BatchRequest((1, clients), page_tokens=32, chunks=(32,))
        extract_language_model(source, folder, cache_length=context, prefill=(32,), batch=batch)
        make_tokenizer().save(str(folder / "tokenizer.json"))
        yield folder


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_load")
    parser.add_argument("folder", type=Path, nargs="?", help="what to serve; default: a small model, made for this")
    parser.add_argument("--device", help="as for npu serve")
    parser.add_argument("--clients", type=int, default=Load.clients)
    parser.add_argument("--prompt", type=int, default=Load.prompt, help="tokens of each")
    parser.add_argument("--answer", type=int, default=Load.answer, help="tokens of each")
    parser.add_argument("--seconds", type=float, default=Load.seconds, help="of each of three loads")
    parser.add_argument("--processes", type=int, default=1, help="in which the clients run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    load = Load(args.clients, args.prompt, args.answer, args.seconds, args.processes)
    if args.folder is None:
        with _small_model(load.clients, 32 * ceil_div(load.prompt + load.answer, 32)) as folder:
            figures = measure(folder, args.device, load)
    else:
        figures = measure(args.folder.resolve(), args.device, load)
    for name, value in figures.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
