"""What thousands of requests leave in a server's process, and what becomes of it when it is killed under load."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import time
from collections import Counter
from shutil import which
from typing import Any

import numpy as np

from benchmarks.serving_memory import fill_tokenizer, send
from tests.support.served_process import resident_bytes
from tests.support.serving import MODEL

__all__ = ["answer", "kill", "wear"]

_PARTS = 4  # of the requests, after each of which everything is let to end
_SECONDS = 30.0
_HEADERS = {"content-type": "application/json"}


def wear(url: str, process: int, requests: int) -> dict[str, Any]:
    """Sends requests of all kinds, as `benchmarks.serving_memory` does; a third of the clients leave.

    Args:
        url: Of the server.
        process: Its number.
        requests: How many.

    Returns:
        `answered`, and `cancelled` by how clients left; `seconds`; after so many `requests` in all, what was `held`
        when all had ended: lanes, pages, and MB of the process and of the device.
    """
    host, port = _place(url)
    fill_tokenizer(host, port)
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    held = []
    for part in range(_PARTS + 1):
        done, todo = requests * max(part - 1, 0) // _PARTS, requests * part // _PARTS
        counts += asyncio.run(send(host, port, range(done, todo)))
        held.append({"requests": todo} | _held(url, process))
    seconds = time.perf_counter() - started
    answered = counts.pop("answered", 0)
    return {"answered": answered, "cancelled": dict(sorted(counts.items())), "seconds": seconds, "held": held}


def answer(url: str, vocabulary: int) -> str:
    """What the model says to a prompt that is always the same."""
    prompt = np.random.default_rng(0).integers(0, vocabulary, 100).tolist()
    with _asked(url, {"prompt": prompt, "max_tokens": 30}) as response:
        given: str = json.load(response)["choices"][0]["text"]
    return given


def kill(url: str, server: subprocess.Popen[str], vocabulary: int, clients: int) -> int:
    """Kills a server in the middle of so many streams; gives how many of its clients are told that it is gone."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, vocabulary, 32).tolist() for _ in range(clients)]
    streams = [_asked(url, {"prompt": prompt, "max_tokens": 400, "stream": True}) for prompt in prompts]
    for stream in streams:
        stream.readline()
    server.kill()
    server.wait()
    told = 0
    for stream in streams:
        try:
            told += b"[DONE]" not in stream.read()
        except (http.client.HTTPException, OSError):
            told += 1
        stream.close()
    return told


def _asked(url: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*_place(url), timeout=60)
    content = {"model": MODEL, "temperature": 0, "ignore_eos": True} | body
    connection.request("POST", "/v1/completions", json.dumps(content), _HEADERS | {"connection": "close"})
    return connection.getresponse()


def _place(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def _held(url: str, process: int) -> dict[str, Any]:
    """What there is, when nothing is left to be done or it did not end."""
    until = time.monotonic() + _SECONDS
    while True:
        gauges = _gauges(url)
        if time.monotonic() > until or not (gauges["used_lanes"] or gauges["used_pages"] or gauges["waiting"]):
            return gauges | {"resident, MB": resident_bytes(process) / 1e6} | _of_device()
        time.sleep(0.05)


def _gauges(url: str) -> dict[str, int]:
    connection = http.client.HTTPConnection(*_place(url), timeout=60)
    connection.request("GET", "/metrics")
    lines = [line.split() for line in connection.getresponse().read().decode().splitlines()]
    connection.close()
    found = {line[0].removeprefix("npu_"): line[1] for line in lines if len(line) == 2}
    return {name: int(float(found[name])) for name in ("waiting", "used_lanes", "pages", "used_pages")}


def _of_device() -> dict[str, float]:
    """Memory in use on a device of Nvidia's, where there is one."""
    if which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    number = told.stdout.strip()
    return {"of the device, MiB": float(number)} if number.isdigit() else {}
