"""What a server answers to clients that are hasty, rude or broken, and that nobody else is harmed by them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from npu_text.batching.texts import Limits
from npu_text.serving.events import EventPace
from tests.support.serving import END, MODEL, Server, running, serve, simulated_app
from tests.support.simulated_engine import SimulatedEngine

httpx = pytest.importorskip("httpx")
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


def slow_engine(seconds: float = 0.01) -> SimulatedEngine:
    """Two lanes; texts end at their limit only."""
    engine = SimulatedEngine(lanes=2, pages=200, page_tokens=16, context=1024)
    engine.chunks, engine.seconds = (32, 128), seconds
    return engine


def events(text: str) -> list[Any]:
    """The content of server-sent events, comments left out; each is one line, and an empty one behind it."""
    lines = text.split("\n\n")
    assert lines.pop() == ""
    data = [line for line in lines if not line.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in data)
    assert data.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in data]


def say(server: Server, text: str) -> None:
    """Makes every answer this text, token by token."""
    server.engine.script = server.service.vocabulary.encode(text, special=False)


def wait_until(condition: Any, seconds: float = 5) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def is_free(server: Server) -> bool:
    status = server.service.core.driver.status()
    return not status.waiting and not any(status.lanes) and status.used_pages == 0 and server.service.core.open == 0


def test_a_stream_is_as_the_api_has_it(server: Server) -> None:
    body = CHAT | {"stream": True, "max_tokens": 12, "stream_options": {"include_usage": True}, "seed": 4}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "mine"
    chunks = events(answer.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] <= 12
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_an_event_holds_several_tokens_where_there_is_no_time_for_each(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token and the end are told at once, whatever lies between when there is time."""
    url, body = f"{server.url}/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 40, "ignore_eos": True}
    body |= {"seed": 4, "logprobs": 1}
    whole = httpx.post(url, json=body).json()["choices"][0]
    monkeypatch.setattr(server.service.core, "_pace", EventPace(60.0))
    choices = [chunk["choices"][0] for chunk in events(httpx.post(url, json=body | {"stream": True}).text)]
    assert len(choices) <= 3
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    told = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert told == whole["logprobs"]["tokens"]
    assert choices[-1]["finish_reason"] == "length"


def test_characters_are_never_split(server: Server) -> None:
    """Each byte is a token here."""
    said = "한글과 😀 mixed é"
    with serve() as own:
        say(own, said)
        chunks = events(httpx.post(f"{own.url}/v1/chat/completions", json=CHAT | {"stream": True}).text)
        pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(pieces) == said
        assert not any("\ufffd" in piece for piece in pieces)
        cut = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT | {"max_tokens": 4}).json()
        assert cut["choices"][0]["message"]["content"] == "한\ufffd"


def test_calls_among_text_are_told_apart() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    said = (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "한"}}\n</tool_call>\n<tool_call>{"name": "f"}'
        "</tool_call>"
    )
    with serve() as own:
        say(own, said)
        whole = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT | {"tools": tools}).json()["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] == "Let me see.\n"
        calls = [json.loads(call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
        assert calls == [{"x": "한"}, {}]
        streamed = events(
            httpx.post(f"{own.url}/v1/chat/completions", json=CHAT | {"tools": tools, "stream": True}).text
        )
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        assert [call["index"] for delta in deltas for call in delta.get("tool_calls", [])] == [0, 1]
        without = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT).json()["choices"][0]
        assert without["message"]["content"] == said
        say(own, "<tool_call>not JSON</tool_call> and more")
        broken = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT | {"tools": tools}).json()["choices"][0]
        assert broken["message"]["content"] == "<tool_call>not JSON</tool_call> and more"


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b"null", 400),
        ("POST", "/v1/chat/completions", b'{"model": "tiny", "messages": [{"role": "king", "content": ""}]}', 400),
        ("POST", "/v1/chat/completions", b'{"model": "tiny", "messages": [], "temperature": NaN}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": []}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": [320]}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": [-1]}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": ""}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        ("POST", "/v1/completions", b'{"model": "\\ud800", "prompt": "a"}', 404),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "logit_bias": {"\\udfff": 1}}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "best_of": 3}', 400),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "n": 129}', 400),
        ("POST", "/v1/completions", b"x" * (5 << 20), 413),
        ("POST", "/v1/nothing", b"{}", 404),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v1/models/other", b"", 404),
    ],
)
def test_bad_requests_get_errors_of_the_api(
    server: Server, method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(method, server.url + path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


def test_unknown_fields_are_ignored_and_known_ones_that_ask_for_nothing_too(server: Server) -> None:
    body = CHAT | {"user": "me", "store": False, "anything": 1, "best_of": 1, "suffix": None, "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200


def test_tokenize_metrics_health_page_and_status(server: Server) -> None:
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "abc"}).json()
    assert tokens["count"] == 3
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["count"] > 3
    assert httpx.post(f"{server.url}/tokenize", json={}).status_code == 400
    httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | {"max_tokens": 3})
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in ("waiting", "used_lanes", "pages", "first_token_seconds_count", "next_token_seconds_count"):
        assert f"npu_{name} " in metrics
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert "<html" in httpx.get(server.url).text
    assert len(httpx.get(f"{server.url}/status").json()["lanes"]) == server.engine.lanes
    allowed = httpx.options(
        f"{server.url}/v1/models", headers={"origin": "http://a", "access-control-request-method": "GET"}
    )
    assert allowed.headers["access-control-allow-origin"] == "*"


def test_keys() -> None:
    from npu_text.serving.guard import GuardOptions

    with serve(guard=GuardOptions(keys=("secret", "other"))) as own:
        assert httpx.get(f"{own.url}/v1/models").status_code == 401
        assert httpx.get(f"{own.url}/v1/models", headers={"authorization": "Bearer no"}).status_code == 401
        assert httpx.get(f"{own.url}/v1/models", headers={"authorization": "bearer other"}).status_code == 200
        assert httpx.get(f"{own.url}/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_lane(stream: bool) -> None:
    with serve(slow_engine()) as own:
        body = CHAT | {"stream": stream, "max_tokens": 900, "ignore_eos": True}
        if stream:
            with httpx.stream("POST", f"{own.url}/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{own.url}/v1/chat/completions", json=body, timeout=0.5)
        started = time.monotonic()
        wait_until(lambda: is_free(own))
        assert time.monotonic() - started < 1
        assert own.service.core.driver.scheduler.counters.finished == {"cancelled": 1}


def test_a_client_that_leaves_the_queue_is_never_started() -> None:
    with serve(slow_engine()) as own:
        body = CHAT | {"stream": True, "max_tokens": 900, "ignore_eos": True}
        with httpx.stream("POST", f"{own.url}/v1/chat/completions", json=body | {"n": 2}) as first:
            lines = first.iter_lines()  # kept: the client leaves when it is gone
            next(lines)
            wait_until(lambda: all(own.service.core.driver.status().lanes))
            with httpx.stream("POST", f"{own.url}/v1/chat/completions", json=body) as second:
                others = second.iter_lines()
                next(others)
                wait_until(lambda: own.service.core.driver.status().waiting == 1)
            wait_until(lambda: own.service.core.driver.status().waiting == 0)
            assert own.engine.calls[0] == 2
        wait_until(lambda: is_free(own))


def test_a_large_request_holds_up_nobody() -> None:
    """Millions of characters take seconds to become tokens."""
    with serve() as own:
        reading, may_end, encode = threading.Event(), threading.Event(), own.service.vocabulary.encode

        def slow(text: str, special: bool) -> Any:
            if len(text) > 100_000:
                reading.set()
                assert may_end.wait(20)
            return encode(text, special)

        own.service.vocabulary.encode = slow
        large = CHAT | {"messages": [{"role": "user", "content": "x" * 200_000}]}
        answers: list[Any] = []
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{own.url}/v1/chat/completions", json=large, timeout=30))
        )
        client.start()
        try:
            assert reading.wait(10)
            assert httpx.post(f"{own.url}/v1/chat/completions", json=CHAT | {"max_tokens": 3}).is_success
            assert httpx.get(f"{own.url}/health").is_success
        finally:
            may_end.set()
            client.join()
        assert answers[0].status_code == 400
        assert answers[0].json()["error"]["code"] == "context_length_exceeded"


def test_a_full_queue_and_a_long_wait_are_told() -> None:
    with serve(slow_engine(0.02), Limits(waiting=2), service={"patience": 0.3}) as own:
        url, long = f"{own.url}/v1/chat/completions", CHAT | {"max_tokens": 60, "n": 2, "ignore_eos": True}

        async def run() -> list[Any]:
            async with httpx.AsyncClient(timeout=30) as client:
                first = asyncio.create_task(client.post(url, json=long))
                while not all(own.service.core.driver.status().lanes):
                    await asyncio.sleep(0.01)
                waiting = asyncio.create_task(client.post(url, json=long))
                while own.service.core.driver.status().waiting < 2:
                    await asyncio.sleep(0.01)
                refused = await client.post(url, json=CHAT)
                return [refused, await waiting, await first]

        refused, late, first = asyncio.run(run())
        assert (refused.status_code, late.status_code, first.status_code) == (429, 429, 200)
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "overloaded"
        assert is_free(own)


def test_slow_readers_and_half_open_connections_harm_nobody() -> None:
    from npu_text.serving.guard import GuardOptions

    with serve(guard=GuardOptions(seconds=0.3), reader=0.3) as own:
        address = own.url.removeprefix("http://").split(":")
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: "
        half = [socket.create_connection((address[0], int(address[1]))) for _ in range(20)]
        for connection in half:
            connection.sendall(f"{head}999\r\n\r\n{{".encode())
        own.engine.ending = -1
        body = json.dumps(CHAT | {"max_tokens": 900, "stream": True, "n": 4, "logprobs": True, "top_logprobs": 20})
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((address[0], int(address[1])))
        slow.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
        assert httpx.post(f"{own.url}/v1/chat/completions", json=CHAT | {"max_tokens": 3}, timeout=20).is_success
        assert b" 408 " in half[0].recv(100)
        wait_until(lambda: is_free(own), 20)
        for connection in [*half, slow]:
            connection.close()


@pytest.mark.parametrize("where", ["a line", "lines", "the address", "behind the body"])
def test_what_is_no_body_has_a_limit(server: Server, where: str) -> None:
    """Without one, whoever sends lines and never ends takes the server's memory."""
    url, endless = "/v1/completions", b"a" * (1 << 16)
    start = f"POST {url} HTTP/1.1\r\nhost: a\r\n".encode()
    if where == "a line":
        start += b"x: "
    elif where == "lines":
        endless = b"".join(b"x%d: a\r\n" % number for number in range(8000))
    elif where == "the address":
        start = f"POST {url}?".encode()
    else:
        start += b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        sent = 0
        with contextlib.suppress(OSError):  # it was closed
            connection.sendall(start)
            while sent < 64 << 20:
                connection.sendall(endless)
                sent += len(endless)
        assert sent < 16 << 20  # what systems keep on the way
    assert httpx.post(f"{server.url}{url}", json={"model": MODEL, "prompt": "a", "max_tokens": 1}).is_success


@pytest.mark.parametrize("said", [b"no request\r\n\r\n", b"GET / HTTP/1.1\r\nx: ".ljust((64 << 10) + 1, b"a")])
def test_what_is_no_request_is_refused_in_the_form_of_the_api(server: Server, said: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(said)
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_who_begins_a_request_and_never_sends_its_head_is_disconnected() -> None:
    """Without an end to waiting, so many open connections are all that a process may have."""
    app, _ = simulated_app()
    with running(app, head_seconds=0.3) as url:
        host, port = url.removeprefix("http://").split(":")
        opened = [socket.create_connection((host, int(port)), timeout=10) for _ in range(6)]
        for connection, said in zip(opened, [b"", b"P", b"GET /health HTTP/1.1\r\nhost: a\r\n"] * 2, strict=True):
            connection.sendall(said)
        later = socket.create_connection((host, int(port)), timeout=10)
        later.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET")  # and another one, of which no more comes
        assert b" 200 " in later.recv(1000)
        for connection in [*opened, later]:
            while connection.recv(1000):
                pass
            connection.close()
        with httpx.Client() as client:  # whose connection lies idle for longer
            assert client.get(f"{url}/health").is_success
            time.sleep(0.5)
            assert client.get(f"{url}/health").is_success


def test_a_body_in_chunks_of_one_byte_is_read(server: Server) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a" * 20_000, "max_tokens": 1})

    def chunks() -> Iterator[bytes]:
        for letter in body:
            yield letter.encode()

    answer = httpx.post(f"{server.url}/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert "context_length" in answer.text


def test_a_device_that_fails_is_told_to_all() -> None:
    with serve(slow_engine()) as own:
        with httpx.stream("POST", f"{own.url}/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            own.engine.fails = True
            assert '"error"' in [line for line in lines if line][-1]
        assert httpx.get(f"{own.url}/health").status_code == 503
        answer = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
        assert "start again" in answer.json()["error"]["message"]


def test_texts_may_end_when_the_server_stops() -> None:
    with serve(slow_engine(0.005), leave=5) as own:
        body = CHAT | {"stream": True, "max_tokens": 60, "ignore_eos": True}
        stream = httpx.stream("POST", f"{own.url}/v1/chat/completions", json=body)
        answer = stream.__enter__()
        text = answer.iter_text()
        next(text)
    rest = "".join(text)
    assert rest.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in rest


def test_hundreds_of_clients_of_whom_a_third_leave() -> None:
    """Seeded answers are the same alone and in company; nothing is left of any of them."""
    random_ = random.Random(1)
    bodies = [
        CHAT | {"messages": [{"role": "user", "content": "x" * random_.randint(1, 60)}], "max_tokens": 12, "seed": seed}
        for seed in range(100)
    ]
    with serve(SimulatedEngine(lanes=8, pages=64, page_tokens=16, context=256)) as own:
        own.engine.ending = END
        url = f"{own.url}/v1/chat/completions"

        async def one(client: Any, body: Any, leaves: bool) -> str:
            if not leaves:
                answer = (await client.post(url, json=body)).json()
                return str(answer["choices"][0]["message"]["content"])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random_.random() * 0.2):
                    await client.post(url, json=body | {"stream": True})
            return ""

        async def run(together: bool) -> list[str]:
            async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=64)) as client:
                if together:
                    leaving = [one(client, body, True) for body in bodies[::2]]
                    everyone = [one(client, body, False) for body in bodies]
                    results = await asyncio.gather(*everyone, *leaving)
                    return results[: len(bodies)]
                return [await one(client, body, False) for body in bodies[:20]]

        together = asyncio.run(run(True))
        assert asyncio.run(run(False)) == together[:20]
        wait_until(lambda: is_free(own))
        own.service.core.driver.scheduler.pool.forget()
        assert own.service.core.driver.scheduler.pool.available == 64
