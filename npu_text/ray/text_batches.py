"""Datasets of texts: an actor for `ray.data.Dataset.map_batches` that continues the texts of a column."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from npu_compiler.errors import DeviceError, InputError
from npu_runtime.device import Device
from npu_text.batching.texts import Limits
from npu_text.serving.chat import Chat
from npu_text.serving.completions import Completion
from npu_text.serving.errors import APIError, field_error
from npu_text.serving.protocol import ChatRequest, CompletionRequest
from npu_text.serving.server import ServerOptions, open_model

__all__ = ["TextBatches"]

# Fields of a request that are not the caller's to give, or of whose answer no column would tell.
_OWN = {"model", "prompt", "messages", "stream", "stream_options", "n", "logprobs", "top_logprobs", "echo"}
_OWN |= {"tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens"}


class TextBatches:
    """Continues the texts of batches, all that are under way together.

    For ``dataset.map_batches(TextBatches, fn_constructor_kwargs={...}, batch_size=..., concurrency=...)``. Calls are
    asynchronous: Ray hands several batches to one actor at once, so that the lanes of one whose texts have ended go to
    the texts of the next.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: str | None = None,
        *,
        column: str = "prompt",
        into: str = "answer",
        request: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens the model; where the actor runs.

        Args:
            folder: What ``npu extract-llm --lanes`` made, by a path that every machine has.
            device: Where to run, by name; the best device of the machine when omitted.
            column: Of the prompts: texts, token ids, or conversations (lists of messages with ``role`` and
                ``content``), which the model's chat template makes texts of.
            into: What the new columns begin with.
            request: Fields of ``/v1/completions`` and ``/v1/chat/completions`` for all texts, such as ``max_tokens``,
                ``temperature``, ``seed``, ``stop`` or ``response_format``.

        Raises:
            InputError: The folder is no language model, or a field is none of these.
            MissingDependencyError: The extra ``serve`` is not installed.
            NPUError: As `open_model`.
        """
        _check(request or {})
        # Nobody else asks, and a text that waits for the others of its dataset is not late.
        options = ServerOptions(name="model", patience=math.inf, limits=Limits(waiting=sys.maxsize))
        service = open_model(Path(folder), Device.of(device), options).service
        if service is None:
            raise InputError(f"'{folder}' holds an encoder, expected a language model")
        self._service, self._column, self._into = service, column, into
        self._request, self._is_running = dict(request or {}), False

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Continues the texts of a batch.

        Args:
            batch: Columns, as numpy arrays or lists, of equal length.

        Returns:
            The batch, and beside it, if `into` is ``answer``: ``answer``, the text; ``answer_finish``, why it ended
            (``stop``, ``length``, or ``error``); ``answer_tokens``, how many were added; ``answer_error``, why there is
            none, empty where there is one. A text that the model cannot take so stops no others.

        Raises:
            InputError: There is no such column.
            DeviceError: The device failed.
        """
        if self._column not in batch:
            raise InputError(f"the batch has no column '{self._column}', it has {', '.join(batch)}")
        if not self._is_running:
            self._is_running = True
            self._service.core.start()  # in the event loop of all calls
        answers = await asyncio.gather(*(self._answer(prompt) for prompt in batch[self._column]))
        texts, finishes, tokens, errors = zip(*answers, strict=True) if answers else ((), (), (), ())
        into = self._into
        return {
            **batch,
            into: list(texts),
            f"{into}_finish": list(finishes),
            f"{into}_tokens": np.array(tokens, np.int64),
            f"{into}_error": list(errors),
        }

    async def _answer(self, prompt: Any) -> tuple[str, str, int, str]:
        """The new columns of a row."""
        try:
            answer = await self._asked(_plain(prompt)).whole()
        except ValidationError as error:
            return _refused(field_error(error.errors()).message)
        except InputError as error:
            return _refused(str(error))
        except APIError as error:
            if error.status >= 500:
                raise DeviceError(error.message) from error
            return _refused(error.message)
        (choice,) = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return text, choice["finish_reason"], answer["usage"]["completion_tokens"], ""

    def _asked(self, prompt: Any) -> Completion | Chat:
        fields = self._request | {"model": self._service.name}
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return Chat(self._service, ChatRequest.model_validate(fields | {"messages": prompt}))
        return Completion(self._service, CompletionRequest.model_validate(fields | {"prompt": prompt}))


def _check(request: Mapping[str, Any]) -> None:
    """Refuses fields before there are any texts."""
    known = (ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()) - _OWN
    wrong = next((name for name in request if name not in known), None)
    if wrong is not None:
        raise InputError(f"given the field '{wrong}' for a request, expected some of {', '.join(sorted(known))}")
    try:
        CompletionRequest.model_validate({**request, "model": "", "prompt": "x"})
    except ValidationError as error:
        raise InputError(field_error(error.errors()).message) from error


def _refused(why: str) -> tuple[str, str, int, str]:
    return "", "error", 0, why


def _plain(value: Any) -> Any:
    """A value of a column as JSON would have it; a field that only other rows have is None in a column."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(held) for name, held in value.items() if held is not None}
    return [_plain(held) for held in value] if isinstance(value, list | tuple) else value
