"""What the processor does for each step of a batch, and for each token that a server streams; needs no GPU.

`python -m benchmarks.serving_overhead --json benchmarks/results/serving_overhead.json`. Times are those of the
processor, of one thread: how much else runs does not count.

- `step`: the thread that drives a device. The engine is real, what it asks of the device takes no time: launches are
  counted and not run. From the tokens of a step to the launch of the next one the device waits, if that was not asked
  for before; at other times it works.
- `stream`: the server's event loop, with clients in another process that read streams. The engine is one that gives
  letters at a pace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, ClassVar

from npu_compiler.frontend.decoder_request import BatchRequest
from npu_runtime import Device
from npu_runtime.backend import Launched, Recording
from npu_text.batching.driver import Driver
from npu_text.batching.engine import Chosen, Filling, LaneSampling, LaneSteps, Prefill, Stepped
from npu_text.batching.paged_engine import PagedEngine
from npu_text.batching.texts import TextRequest, Turn
from tests.support.decoders import make_decoder
from tests.support.serving import MODEL, serve

__all__ = ["main"]

_LANES = (1, 8, 64, 256)
_PAGE, _CONTEXT = 128, 2048
_PROMPT, _ANSWER = 500, 300
_CLIENTS = 64
_SHORT, _LONG = 50, 450  # tokens of a stream


class _Times(Recording):
    """Plans that are not run; when they were asked for, and waited for, in seconds of the thread."""

    taken: list[tuple[float, float, float, float]] = []  # noqa: RUF012 - of all of them, in order

    def launch(self) -> Launched:
        return _Timed(time.thread_time(), self.taken)


class _Timed(Launched):
    def __init__(self, asked: float, taken: list[tuple[float, float, float, float]]) -> None:
        self._asked, self._taken, self._left = asked, taken, time.thread_time()

    def __call__(self) -> None:
        begun = time.thread_time()
        self._taken.append((self._asked, self._left, begun, time.thread_time()))


def steps(lanes: int, engine: PagedEngine, sampling: LaneSampling) -> dict[str, Any]:
    """Microseconds of a step with so many texts, while none begins."""
    taken, turns, ended = _Times.taken, [], threading.Event()
    count = lanes

    def deliver(events: Sequence[Any]) -> None:
        nonlocal count
        count -= sum(bool(event.finish) for event in events)
        if count == 0:
            ended.set()

    def observe(turn: Turn, seconds: float) -> None:
        if not turn.fills and len(turn.running) == lanes:
            before, last = taken[-2:]
            ahead, whole = max(0.0, last[0] - before[3]), last[3] - before[3]
            turns.append((ahead, whole - ahead, whole))
        del taken[:-1]

    taken.clear()
    driver = Driver(engine, deliver, observe=observe)
    for number in range(count):
        prompt = [token % 300 for token in (number, *range(_PROMPT - number % _PAGE))]
        driver.submit(TextRequest(tuple(prompt), _ANSWER + 2 * lanes, sampling, frozenset({301})))
    driver.start()
    ended.wait()
    driver.stop()
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
    pages = max(lanes) * (_CONTEXT // _PAGE)
    request = BatchRequest(tuple(lanes), _PAGE, pages=pages, chunks=(512,))
    decoder = make_decoder(folder, "Qwen2", _CONTEXT, batch=request, max_position_embeddings=_CONTEXT)
    device: Any = Device("software-metal")
    device.backend.record = _Times
    return PagedEngine(decoder.folder, device)


class _Filled:
    def __call__(self) -> tuple[Chosen, ...]:
        return ()

    def is_done(self) -> bool:
        return True


class _Letters:
    """A `BatchEngine` that gives letters at a pace."""

    lanes, page_tokens, pages, context, vocabulary, chunks, guess = 256, 128, 4096, 2048, 320, (512,), 1
    packs: ClassVar[dict[int, tuple[int, ...]]] = {}
    seconds = 0.0

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None: ...

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None: ...

    def copy_page(self, source: int, target: int) -> None: ...

    def prefill(self, *parts: Prefill) -> Filling:
        return _Filled()

    def step(self, steps: LaneSteps) -> Callable[[], Stepped]:
        until = time.perf_counter() + self.seconds

        def wait() -> Stepped:
            time.sleep(max(0.0, until - time.perf_counter()))
            return Stepped(60 + (steps.lanes + steps.positions) % 20)

        return wait


def serve_letters(seconds: float) -> None:
    """A server whose steps take so long; for each line that it reads it prints seconds of its threads so far."""
    engine: Any = _Letters()
    engine.seconds = seconds
    with serve(engine) as server:
        print(server.url, flush=True)
        for _ in sys.stdin:
            names = {thread.name: thread.ident for thread in threading.enumerate() if thread.ident is not None}
            clocks = {name: time.clock_gettime(time.pthread_getcpuclockid(ident)) for name, ident in names.items()}
            print(json.dumps(clocks), flush=True)


def stream(clients: int, kind: str, seconds: float) -> dict[str, Any]:
    """Microseconds of the server's threads for what long streams have more than short ones, of so many clients."""
    command = [sys.executable, "-m", "benchmarks.serving_overhead", "--serve", str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            host, _, port = server.stdout.readline().strip().removeprefix("http://").partition(":")
            told, events = [], []
            for tokens in (_SHORT, _SHORT, _LONG):  # the first time warms up
                events.append(asyncio.run(_read_all(host, int(port), clients, kind, tokens)))
                server.stdin.write("\n")
                server.stdin.flush()
                told.append(json.loads(server.stdout.readline()))
            server.stdin.close()
        finally:
            server.kill()
    used = [{"engine": 0.0, "all": 0.0} | now | {"all": sum(now.values())} for now in told]
    engine, all_threads = (
        (used[2][name] - used[1][name]) - (used[1][name] - used[0][name]) for name in ("engine", "all")
    )
    tokens, more = clients * (_LONG - _SHORT), events[2] - events[1]
    return {
        "clients": clients,
        "kind": kind,
        "tokens of an event": round(tokens / more, 2),
        "event loop, of an event": round(1e6 * (all_threads - engine) / more, 1),
        "engine, of a token": round(1e6 * engine / tokens, 1),
    }


async def _read_all(host: str, port: int, clients: int, kind: str, tokens: int) -> int:
    return sum(await asyncio.gather(*(_read(host, port, kind, tokens) for _ in range(clients))))


async def _read(host: str, port: int, kind: str, tokens: int) -> int:
    """Reads one stream; gives how many events it had."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    if kind == "chat":
        body |= {"messages": [{"role": "user", "content": "hello"}]}
    else:
        body |= {"prompt": "hello"}
    content = json.dumps(body).encode()
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read(-1)
    writer.close()
    if b"[DONE]" not in answer:
        raise SystemExit(f"the server answered {answer[:500]!r}")
    return answer.count(b"data: ") - 1


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", choices=("step", "stream"), help="measure this alone")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of a step, for streams")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve_letters(options.serve)
        return
    figures: dict[str, list[dict[str, Any]]] = {}
    if options.only != "stream":
        figures["step"] = []
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(Path(folder), _LANES)
            drawn = LaneSampling(0.7, top_p=0.9, seed=3)
            penalised = replace(drawn, frequency_penalty=0.1)
            for name, sampling in {"highest": LaneSampling(), "drawn": drawn, "penalised": penalised}.items():
                for lanes in _LANES:
                    engine.lanes = lanes
                    figures["step"].append({"sampling": name} | steps(lanes, engine, sampling))
                    print(figures["step"][-1], flush=True)
    if options.only != "step":
        figures["stream"] = []
        for kind in ("completion", "chat"):
            figures["stream"].append(stream(_CLIENTS, kind, options.pace))
            print(figures["stream"][-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
