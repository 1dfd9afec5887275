"""What a server holds after many requests of which a third are cancelled: memory, pages, tasks, threads.

`python -m benchmarks.serving_memory --json benchmarks/results/serving_memory.json`; needs no GPU, since the device is
simulated. The server is a process of its own; its clients are here.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.serving import MODEL

__all__ = ["fill_tokenizer", "main", "measure", "send"]

_CLIENTS = 64
_WORDS = 12_000  # the package `tokenizers` keeps the tokens of 10,000 words for each thread
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def measure(requests: int, checkpoints: int = 5) -> dict[str, Any]:
    """Serves so many requests.

    Args:
        requests: How many.
        checkpoints: After how many equal parts of them everything is let to end and is counted.

    Returns:
        `seconds` in all; `answered`, and `cancelled` by how clients left; `held` before the first request and after
        each part, as `tests.support.served_process` tells it, with the number of `requests` before; `threads_left`.
    """
    command = [sys.executable, "-m", "tests.support.served_process"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            host, _, port = server.stdout.readline().strip().removeprefix("http://").partition(":")
            counts: Counter[str] = Counter()
            held = []
            started = time.perf_counter()
            fill_tokenizer(host, int(port))
            for part in range(checkpoints + 1):
                done, todo = requests * max(part - 1, 0) // checkpoints, requests * part // checkpoints
                counts += asyncio.run(send(host, int(port), range(done, todo)))
                server.stdin.write("\n")
                server.stdin.flush()
                held.append({"requests": todo} | json.loads(server.stdout.readline()))
            seconds = time.perf_counter() - started
            server.stdin.close()
            left = json.loads(server.stdout.readline())
            server.wait(30)
        finally:
            server.kill()
    answered = counts.pop("answered", 0)
    return {
        "seconds": round(seconds, 1),
        "answered": answered,
        "cancelled": dict(sorted(counts.items())),
        "held": held,
        "threads_left": left,
    }


def fill_tokenizer(host: str, port: int) -> None:
    """Makes the tokenizer keep as many words as it ever does, which would look like a leak if they came one by one."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    for first in range(0, _WORDS, _WORDS // 100):
        prompt = "<|im_end|>".join(f"{number:0100}" for number in range(first, first + _WORDS // 100))
        connection.request("POST", "/tokenize", json.dumps({"prompt": prompt}), {"content-type": "application/json"})
        answer = connection.getresponse().read()
        assert b'"count"' in answer, answer
    connection.close()


async def send(host: str, port: int, numbers: range) -> Counter[str]:
    """Sends requests, some at a time; gives how they ended."""
    counts: Counter[str] = Counter()
    left = iter(numbers)

    async def client() -> None:
        for number in left:
            counts[await _one(host, port, number)] += 1

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return counts


async def _one(host: str, port: int, number: int) -> str:
    """Sends a request; gives whether it was answered, or when its client left."""
    chance = random.Random(number)
    leaves = chance.choice(("in the request", "at once", "soon", "in the answer")) if number % 3 == 0 else ""
    path, body = _request(chance, bool(leaves))
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + (content[: len(content) // 2] if leaves == "in the request" else content))
        await writer.drain()
        if leaves == "soon":
            await asyncio.sleep(chance.random() * 0.05)
        if leaves == "in the answer":
            await reader.readuntil(b"data: ") if body["stream"] else await asyncio.sleep(0.1)
        if leaves:
            return leaves
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if body["stream"] else b"}"), answer
        return "answered"
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def _request(chance: random.Random, long: bool) -> tuple[str, dict[str, Any]]:
    """A request of any kind; a long one is not over before its client has left."""
    text = chance.choice(("", "Of texts that begin alike. " * 2)) + "".join(
        chance.choices("abcdef ", k=chance.randint(1, 40))
    )
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 6,
        "stream": chance.random() < 0.5,
        "n": chance.choice((1, 1, 2)),
    }
    if chance.random() < 0.3:
        body |= {"stop": ["zz", "q"]}
    if long:
        body |= {"max_tokens": 300, "ignore_eos": True, "stop": None}
    if chance.random() < 0.3:
        return "/v1/completions", body | {"prompt": text, "logprobs": chance.choice((None, 2))}
    if not long and chance.random() < 0.2:
        schema = {"name": "s", "schema": _SCHEMA}
        body |= {"max_tokens": 30, "response_format": {"type": "json_schema", "json_schema": schema}}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    figures = measure(options.requests)
    for held in figures["held"]:
        print(
            f"{held['requests']:6} requests: {held['resident_bytes'] / 1e6:6.1f} MB resident, "
            f"{held['available_pages']} of {held['pages']} pages free, {held['lanes']} lanes taken, "
            f"{held['objects']} objects, {held['tasks']} tasks, {held['threads']} threads, "
            f"{held['descriptors']} descriptors, {held['of_requests'] or 'nothing'} of requests"
        )
    print(f"{figures['answered']} answered, cancelled {figures['cancelled']}, {figures['seconds']} s")
    print(f"texts by how they ended: {figures['held'][-1]['finished']}; threads left: {figures['threads_left']}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
