"""The official client, as its users call it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import MODEL, Server, serve

openai = pytest.importorskip("openai")
HELLO: Any = [{"role": "user", "content": "Hello, world"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20)


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20, seed=1)
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20, seed=1)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_stream(client: Any) -> None:
    options: Any = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 30, "seed": 2}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_async_stream(server: Server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=HELLO, max_tokens=20, seed=seed % 2, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    texts = asyncio.run(run())
    assert texts == texts[:2] * 4
