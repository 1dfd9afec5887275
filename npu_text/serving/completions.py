"""POST /v1/completions: texts that go on from a prompt, given as text or tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from npu_compiler.errors import InputError
from npu_text.batching.engine import Chosen
from npu_text.serving.answers import Answers, Piece
from npu_text.serving.core import TextJob
from npu_text.serving.errors import APIError
from npu_text.serving.events import PING, TextEvent, ending, event
from npu_text.serving.protocol import CompletionRequest
from npu_text.serving.service import Service, finish_error, new_id, usage

__all__ = ["Completion", "prompts"]


@dataclass
class _Choice:
    """One of the answers, as far as it is read."""

    texts: list[str] = field(default_factory=list)
    tokens: list[tuple[Chosen, int]] = field(default_factory=list)
    scored: int = 0  # tokens of the prompt that were told
    echoed: bool = False
    finish: str | None = None

    def cut(self) -> None:
        """Forgets what was told."""
        self.texts, self.tokens = [], []


class Completion:
    """A request for texts, and its answer."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        """Reads a request.

        Raises:
            APIError: It cannot be answered.
        """
        service.check(request)
        self._service, self._request = service, request
        self._id, self._created = new_id("cmpl"), int(time.time())
        self._prompts = prompts(service, request.prompt)
        many = len(self._prompts) * (request.n or 1)
        if many > service.options.most_texts:
            raise APIError(f"given {many} texts, expected at most {service.options.most_texts}", param="prompt")
        limit = 16 if request.max_tokens is None else request.max_tokens  # as the API has it
        if limit == 0 and not request.echo:
            raise APIError("given max_tokens=0 without echo, expected at least 1", param="max_tokens")
        form = service.form(request.response_format)
        scored = request.logprobs if request.echo else None
        self.jobs: list[TextJob] = [
            job
            for tokens, _ in self._prompts
            for job in service.jobs(request, tokens, limit=limit, best=request.logprobs, scored=scored, form=form)
        ]
        self._echoes = [self._echo(tokens, text) for tokens, text in self._prompts]

    async def whole(self) -> dict[str, Any]:
        """The answer.

        Raises:
            APIError: It did not end by itself.
        """
        async with self._service.core.answering(self.jobs) as answers:
            choices = [_Choice() for _ in self.jobs]
            async for entry in answers.pieces():
                if entry is not None:
                    self._read(entry[0], choices[entry[0]], entry[1])
                    error = finish_error(entry[1].finish)
                    if error is not None:
                        raise error
            told = [self._told(number, choice) for number, choice in enumerate(choices)]
            return self._head() | {"choices": told, "usage": usage(self._by_prompt(answers))}

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events; nothing comes first, when all its texts are accepted.

        Raises:
            APIError: Before that, that it cannot be answered.
        """
        async with AsyncExitStack() as stack:
            answers = await stack.enter_async_context(self._service.core.answering(self.jobs))
            yield ""
            choices, left, told = [_Choice() for _ in self.jobs], len(self.jobs), ""
            plain = [TextEvent(partial(self._text_chunk, number)) for number in range(len(choices))]
            async for entry in answers.pieces(self._service.options.ping):
                if entry is None:
                    yield PING
                    continue
                number, piece = entry
                if piece.is_text and choices[number].echoed and self._request.logprobs is None:
                    yield plain[number].of(piece.text)
                    continue
                error = finish_error(piece.finish)
                if error is not None:
                    yield event(error.body)
                    return
                self._read(number, choices[number], piece)
                told = event(self._chunk(number, choices[number]))
                choices[number].cut()
                left -= bool(piece.finish)
                if left:
                    yield told
            options = self._request.stream_options
            last = None
            if options is not None and options.include_usage:
                last = self._head() | {"choices": [], "usage": usage(self._by_prompt(answers))}
            yield ending(told, last)

    def _read(self, number: int, choice: _Choice, piece: Piece) -> None:
        text, offsets = self._echoes[number // (self._request.n or 1)]
        if not choice.echoed:
            choice.texts.append(text)
            choice.echoed = True
        tokens = self.jobs[number].request.prompt
        for score in piece.scores:
            choice.tokens.append((score or Chosen(tokens[choice.scored]), offsets[choice.scored]))
            choice.scored += 1
        choice.texts.append(piece.text)
        choice.tokens += [(chosen, len(text) + at) for chosen, at in piece.tokens]
        choice.finish = piece.finish or None

    def _chunk(self, number: int, choice: _Choice) -> dict[str, Any]:
        return self._head() | {"choices": [self._told(number, choice)]}

    def _text_chunk(self, number: int, text: str) -> dict[str, Any]:
        return self._chunk(number, _Choice([text]))

    def _told(self, number: int, choice: _Choice) -> dict[str, Any]:
        logprobs = None if self._request.logprobs is None else self._logprobs(choice.tokens)
        return {
            "index": number,
            "text": "".join(choice.texts),
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }

    def _logprobs(self, tokens: Sequence[tuple[Chosen, int]]) -> dict[str, Any]:
        text_of = self._service.vocabulary.text_of
        return {
            "tokens": [text_of(chosen.token) for chosen, _ in tokens],
            "token_logprobs": [chosen.logprob for chosen, _ in tokens],
            "top_logprobs": [
                None if chosen.logprob is None else {text_of(token): logprob for token, logprob in chosen.best}
                for chosen, _ in tokens
            ],
            "text_offset": [at for _, at in tokens],
        }

    def _echo(self, tokens: Sequence[int], text: str | None) -> tuple[str, list[int]]:
        """A prompt as text, and where each token begins in it."""
        if not self._request.echo:
            return "", []
        offsets, length = [], 0
        for token in tokens:
            offsets.append(length)
            length += len(self._service.vocabulary.text_of(token))
        return self._service.vocabulary.decode(tokens) if text is None else text, offsets

    def _by_prompt(self, answers: Answers) -> list[Answers]:
        each = self._request.n or 1
        return [Answers(answers.all[start : start + each]) for start in range(0, len(answers.all), each)]

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.name,
            "system_fingerprint": self._service.fingerprint,
        }


def prompts(service: Service, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> Any:
    """The tokens of each prompt, with its text where it was given as text.

    Raises:
        APIError: A text that is none, or without tokens.
    """
    given: Any = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    try:
        return [
            (service.vocabulary.encode(one, special=True), one) if isinstance(one, str) else (list(one), None)
            for one in given
        ]
    except InputError as error:
        raise APIError(str(error), param="prompt") from error
