"""The official client, as its users call it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from tests.support.serving import END, MODEL, Server, serve

pytestmark = pytest.mark.usefixtures("openai")
HELLO: Any = [{"role": "user", "content": "Hello, world"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def client(openai: Any, server: Server) -> Any:
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


def test_async_stream(openai: Any, server: Server) -> None:
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


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Seoul", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_tools_that_must_be_called(client: Any, choice: Any) -> None:
    options: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "seed": 3}
    options |= {"max_tokens": 200, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Seoul", "Oslo")
    assert 1 <= arguments["days"] <= 9
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert json.loads(final.message.tool_calls[0].function.arguments) == arguments
    conversation = [*HELLO, whole.message.model_dump(exclude_none=True)]
    conversation.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    answer = client.chat.completions.create(model=MODEL, messages=conversation, tools=[WEATHER], max_tokens=5)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_parsed_schema(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    kind = pydantic.create_model("Step", title=(Literal["one", "two"], ...), done=(bool, ...))
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=kind, max_tokens=200, seed=1, temperature=0.7
    )
    assert isinstance(answer.choices[0].message.parsed, kind)


def test_json_object(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=12, logit_bias={"93": 50}
    )
    assert answer.choices[0].message.content.startswith("{")


def test_several_answers_and_logprobs(client: Any) -> None:
    options: Any = {"model": MODEL, "messages": HELLO, "n": 3, "max_tokens": 8, "seed": 5, "logprobs": True}
    answer = client.chat.completions.create(**options, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert len(entries[0].top_logprobs) == 2
        assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
        assert all(entry.logprob <= 0 for entry in entries)
    assert answer.usage.completion_tokens == sum(
        len(c.logprobs.content) + (c.finish_reason == "stop") for c in answer.choices
    )
    chunks = list(client.chat.completions.create(**options, stream=True))
    for number, choice in enumerate(answer.choices):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert sum(len(each.logprobs.content) for each in own if each.logprobs) == len(choice.logprobs.content)


def test_completions(client: Any, server: Server) -> None:
    answer = client.completions.create(model=MODEL, prompt=["ab", "cd"], max_tokens=6, temperature=0, n=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    tokens = server.service.vocabulary.encode("ab", special=True)
    as_tokens = client.completions.create(model=MODEL, prompt=tokens, max_tokens=6, temperature=0)
    assert as_tokens.choices[0].text == answer.choices[0].text
    stream = client.completions.create(model=MODEL, prompt="ab", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_echo_with_logprobs(client: Any, server: Server) -> None:
    """The log-probabilities are those that the device has for each token behind those before it."""
    text = "The quick brown fox " * 8
    answer = client.completions.create(model=MODEL, prompt=text, max_tokens=3, temperature=0, echo=True, logprobs=2)
    choice, tokens = answer.choices[0], server.service.vocabulary.encode(text, special=True)
    told = choice.logprobs
    assert choice.text.startswith(text)
    assert len(told.tokens) == len(tokens) + answer.usage.completion_tokens - (choice.finish_reason == "stop")
    assert told.token_logprobs[0] is None
    for place in (1, 40, len(tokens) - 1):
        logits = server.engine.logits(tokens[:place]).astype(np.float64)
        expected = logits[tokens[place]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert told.token_logprobs[place] == pytest.approx(expected, abs=1e-6)
        assert len(told.top_logprobs[place]) == 2
    assert [text[at] for at in told.text_offset[: len(text)]] == list(text)
    only = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert only.text == text
    assert only.logprobs.token_logprobs == told.token_logprobs[: len(tokens)]


def test_stop_strings_are_found_across_tokens(client: Any) -> None:
    options: Any = {"model": MODEL, "prompt": "ab", "max_tokens": 40, "temperature": 0}
    options |= {"logit_bias": {str(END): -100}}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[5:9]
    options["stop"] = [stop, "never here"]
    choice = client.completions.create(**options).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    streamed = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_models(openai: Any, client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "gpt-9"}, "NotFoundError", "model"),
        ({"temperature": 3}, "BadRequestError", "temperature"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"max_tokens": 5000}, "BadRequestError", "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "BadRequestError", "messages"),
        ({"functions": [{"name": "f"}]}, "BadRequestError", "functions"),
        ({"top_logprobs": 3}, "BadRequestError", "top_logprobs"),
        ({"logit_bias": {"999": 3}}, "BadRequestError", "logit_bias"),
        ({"tool_choice": "required"}, "BadRequestError", "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
         "BadRequestError", "response_format"),
    ],
)  # fmt: skip
def test_errors_are_those_that_the_client_knows(openai: Any, client: Any, options: Any, error: str, param: str) -> None:
    with pytest.raises(getattr(openai, error)) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO} | {"extra_body": options})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
