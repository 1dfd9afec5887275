"""What each client of `benchmarks.serving_load` does; locust runs it.

A client asks for a text, reads it as it streams, waits where the load has a rate, and asks again. It keeps its
connection, as most libraries for HTTP do, unless it waits in between, when a server may close it; and it writes down
what it asks for next before it reads. Each answer becomes a line of JSON in the file ``records`` with the process's
number behind its name. What to ask for is in the variable NPU_LOAD of the environment, as JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from itertools import count
from pathlib import Path
from typing import Any

from locust import User, task

__all__ = ["Client"]

_LOAD: dict[str, Any] = json.loads(os.environ["NPU_LOAD"])
_RECORDS = Path(f"{_LOAD['records']}-{os.getpid()}")
_NUMBERS = count()
_HEADERS = {"content-type": "application/json"}


class Client(User):
    """One client."""

    def on_start(self) -> None:
        """Draws what it asks for from numbers of its own; where the load has a rate, it begins at any time."""
        self._number = f"{os.getpid()}-{next(_NUMBERS)}"
        self._random = random.Random(self._number)
        self._connection = http.client.HTTPConnection(str(self.host).removeprefix("http://"), timeout=600)
        self._body = self._drawn()
        self._due = time.time()
        if _LOAD["period"] is not None:
            self._due += self._random.random() * _LOAD["period"]
            time.sleep(self._due - time.time())

    def wait_time(self) -> float:
        """Seconds from an answer to the next request: none, or such that requests come at random at the wanted rate.

        Who is answered too late for its next request asks at once, and not less often in all.
        """
        if _LOAD["period"] is None:
            return 0.0
        self._due += self._random.expovariate(1 / _LOAD["period"])
        return max(0.0, self._due - time.time())

    @task
    def ask(self) -> None:
        """Reads one text."""
        asked = time.time()
        error: Exception | None = None
        tokens = 0
        try:
            first, tokens = self._read()
            record = {"client": self._number, "asked": asked, "first": first, "end": time.time()}
            with _RECORDS.open("a") as file:
                file.write(json.dumps(record | {"tokens": tokens}) + "\n")
        except (OSError, http.client.HTTPException, ValueError) as failure:
            error = failure
        self.environment.events.request.fire(
            request_type="POST",
            name="/v1/completions",
            response_time=1000 * (time.time() - asked),
            response_length=tokens,
            exception=error,
            context={},
        )

    def _drawn(self) -> str:
        """What to ask for."""
        prompt = [self._random.randrange(_LOAD["vocabulary"]) for _ in range(_LOAD["prompt"])]
        body = {"model": _LOAD["model"], "prompt": prompt, "max_tokens": _LOAD["answer"], "temperature": 0}
        return json.dumps(body | {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}})

    def _read(self) -> tuple[float, int]:
        """When the first token came, and how many there were."""
        is_kept = False
        try:
            self._connection.request("POST", "/v1/completions", self._body, _HEADERS)
            self._body = self._drawn()
            answer = self._connection.getresponse()
            first, end = 0.0, b""
            while part := answer.read1(1 << 16):
                if not first and b"data: {" in part:
                    first = time.time()
                end = (end + part)[-4096:]
            is_kept = _LOAD["period"] is None
        finally:
            if not is_kept:
                self._connection.close()  # the next request opens it again
        last = end.split(b"\n\n")[-3:-1]  # usage, and the end
        if not first or answer.status != 200 or len(last) != 2 or last[1] != b"data: [DONE]":
            raise ValueError(f"status {answer.status}, and at the end {end[-300:]!r}")
        return first, json.loads(last[0].removeprefix(b"data: "))["usage"]["completion_tokens"]
