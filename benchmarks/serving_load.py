"""What a server gives many clients, who are locust's: tokens a second, and the times that they wait.

``python -m benchmarks.serving_load --json benchmarks/results/serving_load_software_gpu.json`` serves a small Qwen2 with
random weights; ``python -m benchmarks.serving_load FOLDER --device cuda --clients 64 --prompt 512 --answer 256
--processes 8`` what ``npu extract-llm --lanes`` made. Prompts are random tokens, so that none begins as another does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

__all__ = ["main", "measure"]

_ROOT = Path(__file__).parents[1]
_MODEL = "served"


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
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        steps = pool.submit(_step_seconds, folder, (device or "").split(",")[0] or None, load).result()
    vocabulary = GenerationSpec.load(folder).vocabulary
    with _server(folder, device) as url:
        _ask(url, vocabulary, load, 1, 2.0, None)  # what is made when it is first asked for
        alone = _ask(url, vocabulary, load, 1, load.seconds, None)
        together = _ask(url, vocabulary, load, load.clients, load.seconds, None)
        one, most = _throughput(alone), _throughput(together)
        period = 2 * load.clients * load.answer / most
        half = _ask(url, vocabulary, load, load.clients, load.seconds + period, period)
    first = sorted(record["first"] - record["asked"] for record in half)
    between = [(record["end"] - record["first"]) / (record["tokens"] - 1) for record in alone]
    single, many = steps
    return {
        "clients": load.clients,
        "prompt, tokens": load.prompt,
        "answer, tokens": load.answer,
        "decode step of one lane, ms": 1000 * single,
        f"decode step of {load.clients} lanes, ms": 1000 * many,
        "one client, tokens/s": one,
        "all clients, tokens/s": most,
        "all clients over one": most / one,
        "all clients over the decode step alone": most * many / load.clients,
        "one client: time for a token over the decode step": median(between) / single,
        "half load: requests": len(half),
        "half load: first token p50, ms": 1000 * float(np.percentile(first, 50)),
        "half load: first token p99, ms": 1000 * float(np.percentile(first, 99)),
    }


def _step_seconds(folder: Path, device: str | None, load: Load) -> tuple[float, float]:
    """What a step takes of one lane, and of as many as there are clients or lanes; to be called in another process."""
    from npu_runtime import Device
    from npu_text.batching.paged_engine import PagedEngine

    engine = PagedEngine(folder, Device(device))
    return _lanes_seconds(engine, 1, load), _lanes_seconds(engine, min(load.clients, engine.lanes), load)


def _lanes_seconds(engine: Any, lanes: int, load: Load) -> float:
    """What a step takes of so many lanes, in the middle of the answers."""
    from npu_text.batching.engine import LaneSampling, LaneStep, Prefill

    start = load.prompt + load.answer // 2
    each = ceil_div(load.prompt + load.answer, engine.page_tokens)
    pages = [tuple(range(lane * each, (lane + 1) * each)) for lane in range(lanes)]
    for lane in range(lanes):
        engine.begin(lane, LaneSampling(), [1])
        for at in range(0, start, engine.chunks[-1]):
            part = [1] * min(engine.chunks[-1], start - at)
            engine.prefill(Prefill(lane, part, at, pages[lane], choose=False))()
    tokens, seconds = [1] * lanes, []
    for position in range(start, load.prompt + load.answer):
        began = time.perf_counter()
        steps = [LaneStep(lane, (tokens[lane],), position, pages[lane]) for lane in range(lanes)]
        tokens = [chosen[0].token for chosen in engine.step(steps)()]
        seconds.append(time.perf_counter() - began)
    return median(seconds)


@contextmanager
def _server(folder: Path, device: str | None) -> Iterator[str]:
    """`npu serve` as users start it; its address."""
    command = [sys.executable, "-m", "npu_cli", "serve", str(folder), "--port", "0", "--name", _MODEL]
    command += ["--device", device] if device else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.terminate()
            server.wait(60)


def _ask(
    url: str, vocabulary: int, load: Load, clients: int, seconds: float, period: float | None
) -> list[dict[str, Any]]:
    """Has clients ask for texts, each again as soon as it was answered, or once in a period on average; gives a record
    of each answer."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"model": _MODEL, "vocabulary": vocabulary, "prompt": load.prompt, "answer": load.answer}
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


def _throughput(records: Sequence[dict[str, Any]]) -> float:
    """Tokens a second while all clients had a text open."""
    clients: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        clients[record["client"]].append(record)
    start = max(min(record["asked"] for record in own) for own in clients.values())
    end = min(max(record["end"] for record in own) for own in clients.values())
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
        print(f"{name}: {value:.4g}")
    if args.json:
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "device": args.device or "the best"}
        content = {"machine": machine | {"date": f"{date.today()}"}, **figures}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
