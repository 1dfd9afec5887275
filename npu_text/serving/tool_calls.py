"""Calls of tools in what a model writes: the blocks of Hermes, which Qwen and others were trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from npu_text.serving.answers import StopStrings

__all__ = ["BEGIN", "END", "ToolCall", "ToolCalls"]

BEGIN, END = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCalls:
    """Tells calls and text apart, as a text comes.

    A block that is no call is text.
    """

    def __init__(self) -> None:
        self._outside = StopStrings([BEGIN])
        self._block: str | None = None
        self._gap: str | None = None  # blanks behind a call, which are text only where text follows

    def push(self, text: str) -> Iterator[str | ToolCall]:
        """What is known of the text by now."""
        while text:
            if self._block is None:
                plain, text = self._plain(text)
                yield from self._text(plain)
            else:
                self._block += text
                body, found, text = self._block.partition(END)
                if not found:
                    return
                self._block = None
                call = _call(body)
                if call is None:
                    yield from self._text(BEGIN + body + END)
                else:
                    self._gap = ""
                    yield call

    def flush(self) -> Iterator[str | ToolCall]:
        """What is left when no text follows."""
        if self._block is not None:
            block, self._block = self._block, None
            call = _call(block)
            if call is None:
                yield from self._text(BEGIN + block)
            else:
                yield call
        else:
            yield from self._text(self._outside.flush())

    def _plain(self, text: str) -> tuple[str, str]:
        """The text ahead of a block, and what is behind the block's beginning."""
        held = self._outside.flush() + text
        plain, found = self._outside.push(held)
        if not found:
            return plain, ""
        self._block = ""
        return plain, held[len(plain) + len(BEGIN) :]

    def _text(self, text: str) -> Iterator[str]:
        if self._gap is not None and not text.strip():
            self._gap += text
        elif text:
            text, self._gap = (self._gap or "") + text, None
            yield text


def _call(body: str) -> ToolCall | None:
    """The call in a block; None where it is none, or has what UTF-8 cannot hold."""
    try:
        content = json.loads(body)
        if not isinstance(content, dict) or not isinstance(content.get("name"), str):
            return None
        arguments = content.get("arguments", content.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        (content["name"] + arguments).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(content["name"], arguments)
