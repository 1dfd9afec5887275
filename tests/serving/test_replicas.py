"""Several processes behind one server: as one to clients, and none of them is missed for long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from npu_compiler.errors import DeviceError
from npu_text.serving.routing import Router, count_texts
from tests.support.replica_apps import LANES, nothing, refused, simulated
from tests.support.serving import MODEL, running, serve

httpx = pytest.importorskip("httpx")
pytest.importorskip("aiohttp")
LONG: Any = {"model": MODEL, "prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}


class Front(NamedTuple):
    url: str
    replicas: Any


@contextmanager
def front(*makes: Callable[[], Any]) -> Iterator[Front]:
    from npu_text.serving.front import make_front
    from npu_text.serving.guard import GuardOptions
    from npu_text.serving.replicas import Replicas

    replicas = Replicas([(f"replica {number}", make) for number, make in enumerate(makes)])
    replicas.start()
    with running(make_front(replicas, GuardOptions(keys=("secret",)))) as url:
        yield Front(url, replicas)
    assert not replicas.ready
    for replica in replicas.all:
        with pytest.raises(ProcessLookupError):
            os.kill(replica.pid, 0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    failing = str(tmp_path_factory.mktemp("replicas") / "fails")
    with front(partial(simulated, 0.01, failing), partial(simulated, 0.01)) as found:
        yield found


HEADERS = {"authorization": "Bearer secret", "accept-encoding": "gzip"}


def post(two: Front, body: Any, path: str = "/v1/completions") -> Any:
    return httpx.post(two.url + path, json=body, headers=HEADERS, timeout=60)


def get(two: Front, path: str) -> Any:
    return httpx.get(two.url + path, headers=HEADERS, timeout=60)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def used(two: Front) -> int:
    return sum(lane is not None for lane in get(two, "/status").json()["lanes"])


def test_answers_are_those_of_one_server(two: Front) -> None:
    bodies = [
        {"model": MODEL, "prompt": f"Text {number}", "max_tokens": 12, "seed": number, "logprobs": 1}
        for number in range(12)
    ]
    with serve() as alone:
        expected = [httpx.post(f"{alone.url}/v1/completions", json=body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert [answer.json()["choices"] for answer in pool.map(partial(post, two), bodies)] == expected


def test_what_is_told_is_of_all(two: Front) -> None:
    assert get(two, "/health").json() == {"status": "ok", "replicas": 2, "ready": 2}
    status = get(two, "/status").json()
    assert (len(status["lanes"]), status["pages"]) == (2 * LANES, 800)
    before = figures(two)
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(lambda _: post(two, LONG | {"stream": False, "max_tokens": 40}), range(9)))
    after = figures(two)
    assert (after["npu_lanes"], after["npu_pages"], after["npu_ready_replicas"]) == (2 * LANES, 800, 2)
    assert after["npu_added_tokens_total"] - before["npu_added_tokens_total"] == 9 * 40
    assert after["npu_first_token_seconds_count"] - before["npu_first_token_seconds_count"] == 9
    name = 'npu_first_token_seconds_bucket{le="+Inf"}'
    assert after[name] - before[name] == 9
    page = get(two, "/")
    assert "<html" in page.text
    assert len(page.headers.get_list("date")) == len(page.headers.get_list("x-request-id")) == 1


def figures(two: Front) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in get(two, "/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_errors_are_the_servers_own(two: Front) -> None:
    assert httpx.get(f"{two.url}/v1/models").status_code == 401
    wrong = post(two, {"model": "another", "prompt": "a"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    assert post(two, {}).status_code == 400
    assert get(two, "/nothing?a=%2F").status_code == 404
    assert httpx.post(f"{two.url}/v1/completions", content=b"x" * (5 << 20), headers=HEADERS).status_code == 413


@contextmanager
def streaming(two: Front, tokens: int = 900) -> Iterator[Iterator[Any]]:
    """The data of a text's events, the first of which has come."""
    body = LONG | {"max_tokens": tokens}
    with httpx.stream("POST", f"{two.url}/v1/completions", json=body, headers=HEADERS, timeout=60) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def test_texts_stream_as_they_come_and_end_with_their_clients(two: Front) -> None:
    with streaming(two), streaming(two), streaming(two), streaming(two), streaming(two), streaming(two):
        assert used(two) == 6  # none of them has to wait for a lane; all are on their way
    wait_until(lambda: used(two) == 0, 10)


def test_a_replica_that_dies_is_started_again_and_nobody_elses_text_is_harmed(two: Front) -> None:
    with streaming(two, 200) as first, streaming(two, 200) as second:
        before = two.replicas.all[0].pid
        os.kill(before, signal.SIGKILL)
        told, done = sorted([list(lines)[-1] for lines in (first, second)], key="[DONE]".__eq__)
        assert "ended meanwhile" in json.loads(told)["error"]["message"]
        assert done == "[DONE]"
        assert get(two, "/health").json()["status"] == "ok"
        assert post(two, LONG | {"stream": False, "max_tokens": 5}).status_code == 200
    wait_until(lambda: get(two, "/health").json()["ready"] == 2)
    assert two.replicas.all[0].pid != before


def test_a_replica_whose_device_failed_is_replaced(two: Front, tmp_path_factory: pytest.TempPathFactory) -> None:
    replica = two.replicas.all[0]
    failing, before = Path(replica._make.args[1]), replica.pid
    failing.touch()
    assert post(two, LONG | {"stream": False, "max_tokens": 5}).status_code in (500, 503)
    failing.unlink()
    wait_until(
        lambda: post(two, LONG | {"stream": False, "max_tokens": 5}).status_code == 200 and replica.pid != before
    )
    wait_until(lambda: get(two, "/health").json()["ready"] == 2)


def test_one_that_does_not_start_is_told_and_leaves_no_other() -> None:
    with pytest.raises(DeviceError, match="replica 1 does not start: not here"), front(nothing, refused):
        pass


def test_requests_go_where_the_fewest_texts_are_open() -> None:
    router = Router(3)
    assert router.choose([0, 1, 2], b"") == 0
    with router.asking(0, 1), router.asking(1, 3):
        assert router.choose([0, 1, 2], b"") == 2
        assert router.choose([0, 1], b"") == 0
    assert router.open == [0, 0, 0]


def test_requests_that_begin_alike_go_together_while_that_harms_nobody() -> None:
    router = Router(2)
    talk = b'{"messages": ["' + bytes(range(32, 127)) * 40
    with router.asking(0, 1):
        assert router.choose([0, 1], talk) == 1
    assert router.choose([0, 1], talk + b"and on") == 1
    assert router.choose([0, 1], talk[:-2000] + b"-" * 2000) == 1
    assert router.choose([0, 1], b"-" * len(talk)) == 0
    with router.asking(1, 4):
        assert router.choose([0, 1], talk) == 1
    with router.asking(1, 5):
        assert router.choose([0, 1], talk) == 0
    router.forget(0)
    assert router.choose([0, 1], talk) == 1


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3], "n": 4}, 4),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1], [2]]}, 2),
        ({"messages": [], "n": 2}, 2),
        ({"input": ["a"] * 300}, 128),
        ({"n": "many", "prompt": []}, 1),
        ([], 1),
    ],
    ids=str,
)
def test_texts_of_a_request(body: Any, count: int) -> None:
    assert count_texts(json.dumps(body).encode()) == count
    assert count_texts(b"[" * 100_000) == count_texts(b"\xff") == 1


def test_processes_end_with_what_started_them() -> None:
    script = (
        "from npu_text.serving.replicas import Replicas\n"
        "from tests.support.replica_apps import nothing\n"
        "if __name__ == '__main__':\n"
        "    replicas = Replicas([('one', nothing)]); replicas.start()\n"
        "    print(replicas.all[0].pid, flush=True); input()\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_gone, 30)
