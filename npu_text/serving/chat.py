"""POST /v1/chat/completions: conversations, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from npu_compiler.errors import InputError
from npu_text.serving.answers import Piece
from npu_text.serving.core import TextJob
from npu_text.serving.errors import APIError
from npu_text.serving.events import PING, TextEvent, ending, event
from npu_text.serving.protocol import ChatRequest, Message, NamedTool, Tool
from npu_text.serving.service import Service, finish_error, new_id, usage
from npu_text.serving.tool_calls import ToolCall, ToolCalls

__all__ = ["Chat", "conversation"]


@dataclass
class _Choice:
    """One of the answers, as far as it is read."""

    calls: ToolCalls | None
    content: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    called: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""


class Chat:
    """A request for a chat, and its answer."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        """Reads a request.

        Raises:
            APIError: It cannot be answered.
        """
        service.check(request)
        if request.top_logprobs and not request.logprobs:
            raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
        self._service, self._request = service, request
        self._id, self._created = new_id("chatcmpl"), int(time.time())
        tools = self._tools()
        form = self._forced(tools) or service.form(request.response_format)
        self._reads_calls = bool(tools)
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        if limit == 0:
            raise APIError("given max_tokens=0, expected at least 1", param="max_tokens")
        self.jobs: list[TextJob] = service.jobs(
            request,
            conversation(service, request.messages, tools, request.chat_template_kwargs),
            limit=limit,
            best=(request.top_logprobs or 0) if request.logprobs else None,
            form=form,
        )

    async def whole(self) -> dict[str, Any]:
        """The answer.

        Raises:
            APIError: It did not end by itself.
        """
        async with self._service.core.answering(self.jobs) as answers:
            choices = self._choices()
            async for entry in answers.pieces():
                if entry is not None:
                    for _ in self._read(choices[entry[0]], entry[1]):
                        pass
                    error = finish_error(entry[1].finish)
                    if error is not None:
                        raise error
            return self._head("chat.completion") | {
                "choices": [self._whole_choice(number, choice) for number, choice in enumerate(choices)],
                "usage": usage([answers]),
            }

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events; the first comes when all its texts are accepted.

        Raises:
            APIError: Before the first event, that it cannot be answered.
        """
        async with AsyncExitStack() as stack:
            answers = await stack.enter_async_context(self._service.core.answering(self.jobs))
            choices = self._choices()
            left, told = len(choices), ""
            for number in range(len(choices)):
                yield event(self._chunk(number, {"role": "assistant", "content": ""}))
            plain = [TextEvent(partial(self._text_chunk, number)) for number in range(len(choices))]
            async for entry in answers.pieces(self._service.options.ping):
                if entry is None:
                    yield PING
                    continue
                number, piece = entry
                if piece.is_text and not self._reads_calls:
                    yield plain[number].of(piece.text)
                    continue
                told = "".join(map(event, self._chunks(number, choices[number], piece)))
                error = finish_error(piece.finish)
                if error is not None:
                    yield told + event(error.body)
                    return
                left -= bool(piece.finish)
                if left and told:
                    yield told
            last = None
            if self._wants_usage:
                last = self._head("chat.completion.chunk") | {"choices": [], "usage": usage([answers])}
            yield ending(told, last)

    @property
    def _wants_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and bool(options.include_usage)

    def _tools(self) -> list[Tool]:
        choice, tools = self._request.tool_choice, self._request.tools or []
        if choice == "required" and not tools:
            raise APIError("given tool_choice without tools", param="tool_choice")
        if isinstance(choice, NamedTool) and all(tool.function.name != choice.function.name for tool in tools):
            raise APIError(f"there is no tool '{choice.function.name:.80}'", param="tool_choice")
        return [] if choice == "none" else tools

    def _forced(self, tools: list[Tool]) -> str | None:
        """The grammar of calls where there must be one."""
        choice = self._request.tool_choice
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
        elif choice != "required":
            return None
        several = choice == "required" and self._request.parallel_tool_calls is not False
        return self._service.grammars.calls([tool.function.model_dump() for tool in tools], several)

    def _choices(self) -> list[_Choice]:
        return [_Choice(ToolCalls() if self._reads_calls else None) for _ in self.jobs]

    def _read(self, choice: _Choice, piece: Piece) -> Iterator[str | dict[str, Any]]:
        """Takes a piece; gives what is new: text, and calls."""
        if self._request.logprobs:
            choice.logprobs += [self._service.token_entry(chosen) for chosen, _ in piece.tokens]
        parts: list[str | ToolCall] = [piece.text] if piece.text else []
        if choice.calls is not None:
            parts = list(choice.calls.push(piece.text))
            if piece.finish:
                parts += choice.calls.flush()
        for part in parts:
            if isinstance(part, str):
                choice.content.append(part)
                yield part
            elif not choice.called or self._request.parallel_tool_calls is not False:
                function = {"name": part.name, "arguments": part.arguments}
                choice.called.append({"id": new_id("call"), "type": "function", "function": function})
                yield choice.called[-1]
        if piece.finish:
            choice.finish = "tool_calls" if choice.called and piece.finish == "stop" else piece.finish

    def _chunks(self, number: int, choice: _Choice, piece: Piece) -> Iterator[dict[str, Any]]:
        before = len(choice.logprobs)
        deltas: list[dict[str, Any]] = []
        for part in self._read(choice, piece):
            if isinstance(part, str):
                deltas.append({"content": part})
            else:
                deltas.append({"tool_calls": [{"index": len(choice.called) - 1, **part}]})
        logprobs = choice.logprobs[before:]
        if logprobs and not deltas:
            deltas.append({"content": ""})
        for delta in deltas:
            yield self._chunk(number, delta, logprobs=logprobs)
            logprobs = []
        if piece.finish and finish_error(piece.finish) is None:
            yield self._chunk(number, {}, choice.finish)

    def _text_chunk(self, number: int, text: str) -> dict[str, Any]:
        return self._chunk(number, {"content": text})

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        told = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": number, "delta": delta, "logprobs": told, "finish_reason": finish}
        extra = {"usage": None} if self._wants_usage else {}
        return self._head("chat.completion.chunk") | {"choices": [choice]} | extra

    def _whole_choice(self, number: int, choice: _Choice) -> dict[str, Any]:
        content = "".join(choice.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.called:
            message |= {"content": content or None, "tool_calls": choice.called}
        logprobs = {"content": choice.logprobs, "refusal": None} if self._request.logprobs else None
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
            "system_fingerprint": self._service.fingerprint,
        }


def conversation(
    service: Service, messages: list[Message], tools: list[Tool], options: Mapping[str, Any] | None
) -> list[int]:
    """The tokens of a conversation, by the model's template.

    Raises:
        APIError: The model has none, or it does not take these messages.
    """
    if service.template is None:
        raise APIError(
            "this model has no chat template; use /v1/completions, or put its tokenizer_config.json or "
            "chat_template.jinja into its folder",
            param="messages",
        )
    told = [_plain(message) for message in messages]
    functions = [tool.model_dump(exclude_none=True) for tool in tools] or None
    try:
        text = service.template.render(told, functions, _options(options))
        return service.vocabulary.encode(text, special=False)
    except InputError as error:
        raise APIError(str(error), param="messages") from error


def _options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a client may tell the template beside the messages."""
    own = ("messages", "tools")
    wrong = next((name for name in options or {} if name in own), None)
    if wrong is not None:
        raise APIError(f"'{wrong}' is a field of the request", param="chat_template_kwargs")
    return dict(options or {})


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates take it."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _text(message: Message) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    wrong = next((part.type for part in message.content if part.type != "text" or part.text is None), None)
    if wrong is not None:
        raise APIError(f"given a part of the type '{wrong:.40}'; this model reads text", param="messages")
    return "".join(part.text or "" for part in message.content)


def _arguments(text: str) -> Any:
    """Arguments of a call as an object, which templates write as JSON themselves."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
