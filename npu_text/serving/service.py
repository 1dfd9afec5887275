"""One model behind the API: what requests ask for, as texts for the scheduler. `chat` and `completions` answer them."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npu_compiler import __version__
from npu_compiler.errors import InputError
from npu_text.batching.engine import Chosen, LaneSampling
from npu_text.batching.texts import Grammar, TextRequest
from npu_text.serving.answers import Answers
from npu_text.serving.chat_template import ChatTemplate
from npu_text.serving.core import Core, TextJob
from npu_text.serving.errors import APIError, unknown_model
from npu_text.serving.grammars import Grammars, json_grammar
from npu_text.serving.protocol import UNSUPPORTED, ResponseFormat, SamplingFields
from npu_text.serving.vocabulary import Vocabulary

__all__ = ["Service", "ServiceOptions", "finish_error", "new_id", "refuse_unsupported", "usage"]

_SEEDS = 1 << 63


@dataclass(frozen=True)
class ServiceOptions:
    """How a server treats requests.

    Attributes:
        patience: Seconds for which a text may wait to start.
        ping: Seconds of silence after which a stream says that it is alive.
        temperature: Where a request names none.
        most_texts: Texts of one request.
    """

    patience: float = 60.0
    ping: float = 15.0
    temperature: float = 1.0
    most_texts: int = 128


@dataclass
class Service:
    """A model, and everything that requests to it need.

    Attributes:
        name: By which clients ask for it.
        core: Runs its texts.
        ends: Tokens that end a text.
        template: Makes texts of conversations; None where the model has none.
        grammars: Makes forms for answers.
        options: How requests are treated.
    """

    name: str
    core: Core
    ends: frozenset[int]
    template: ChatTemplate | None
    grammars: Grammars
    options: ServiceOptions = field(default_factory=ServiceOptions)

    @property
    def vocabulary(self) -> Vocabulary:
        """Its tokens."""
        return self.core.vocabulary

    @property
    def fingerprint(self) -> str:
        """What answers may depend on beside the request."""
        return f"npu-{__version__}"

    def check(self, request: SamplingFields) -> None:
        """Refuses what is known and not supported, and other models.

        Raises:
            APIError: Which field it is.
        """
        refuse_unsupported(request.model_extra)
        if request.model != self.name:
            raise unknown_model(request.model, [self.name])
        if request.stream_options is not None and not request.stream:
            raise APIError("stream_options is only for streams; set stream", param="stream_options")

    def jobs(
        self,
        request: SamplingFields,
        prompt: Sequence[int],
        *,
        limit: int | None,
        best: int | None,
        scored: int | None = None,
        form: str | None = None,
    ) -> list[TextJob]:
        """The texts that a request asks for, one for each of its ``n``.

        Args:
            request: Which.
            prompt: The tokens to go on from.
            limit: How many tokens to add; None for as many as there is room for.
            best: As `LaneSampling.best`.
            scored: As `TextRequest.scored`.
            form: The grammar of the answer.

        Raises:
            APIError: A text that does not fit the model.
        """
        if not prompt:
            raise APIError("given a prompt without tokens, expected at least one", param="prompt")
        limit = self._limit(len(prompt), limit)
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        base = TextRequest(
            tuple(prompt),
            limit,
            stop=frozenset() if request.ignore_eos else self.ends,
            priority=request.priority or 0,
            patience=self.options.patience,
            scored=scored,
        )
        sampling = self._sampling(request, best)
        penalised = bool(request.presence_penalty or request.frequency_penalty or request.repetition_penalty)
        return [
            TextJob(
                replace(
                    base,
                    sampling=replace(sampling, seed=(sampling.seed + number) % _SEEDS),
                    grammar=self._grammar(form),
                    guesser=None if penalised or self.core.guesser is None else self.core.guesser(),
                ),
                stop,
                places=best is not None,
                stream=bool(request.stream),
            )
            for number in range(request.n or 1)
        ]

    def form(self, response_format: ResponseFormat | None) -> str | None:
        """The grammar of a ``response_format``.

        Raises:
            APIError: A schema is missing.
        """
        if response_format is None or response_format.type == "text":
            return None
        if response_format.type == "json_object":
            return json_grammar(None)
        if response_format.json_schema is None or response_format.json_schema.schema_ is None:
            raise APIError("given json_schema without a schema", param="response_format.json_schema.schema")
        return json_grammar(response_format.json_schema.schema_)

    def token_entry(self, chosen: Chosen) -> dict[str, Any]:
        """A token with its log-probabilities, as chats tell them."""
        return self._entry(chosen.token, chosen.logprob) | {
            "top_logprobs": [self._entry(token, logprob) for token, logprob in chosen.best]
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        held = self.vocabulary.bytes_of(token)
        return {"token": held.decode(errors="replace"), "logprob": logprob, "bytes": list(held)}

    def _grammar(self, form: str | None) -> Grammar | None:
        try:
            return None if form is None else self.grammars.make(form)
        except InputError as error:
            raise APIError(str(error), param="response_format") from error

    def _limit(self, prompt: int, limit: int | None) -> int:
        room = self.core.engine.context - prompt
        if room < (1 if limit is None else limit):
            raise APIError(
                f"this model's texts have at most {self.core.engine.context} tokens; the prompt has {prompt}"
                + (f", and {limit} more were asked for" if limit else ""),
                param="max_tokens" if room > 0 else "messages",
                code="context_length_exceeded",
            )
        return room if limit is None else limit

    def _sampling(self, request: SamplingFields, best: int | None) -> LaneSampling:
        temperature = self.options.temperature if request.temperature is None else request.temperature
        seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed % _SEEDS
        return LaneSampling(
            temperature=temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=self._bias(request.logit_bias or {}),
            seed=seed,
            best=best,
        )

    def _bias(self, bias: Mapping[str, float]) -> dict[int, float]:
        wrong = next((key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
        wrong = wrong or next((key for key in bias if int(key) >= self.core.engine.vocabulary), None)
        if wrong is not None:
            raise APIError(
                f"given a bias for the token '{wrong:.40}', expected 0 to {self.core.engine.vocabulary - 1}",
                param="logit_bias",
            )
        return {int(key): value for key, value in bias.items()}


def refuse_unsupported(fields: Mapping[str, Any] | None) -> None:
    """Refuses fields that clients know, and that would change the answer if they were not ignored.

    Raises:
        APIError: Which one.
    """
    for name, value in (fields or {}).items():
        if name in UNSUPPORTED and not any(value == harmless for harmless in UNSUPPORTED[name]):
            raise APIError(f"'{name}' is not supported; leave it out", param=name, code="unsupported_parameter")


def usage(answers: Sequence[Answers]) -> dict[str, Any]:
    """Tokens that were taken and given; answers to the same prompt count it once."""
    prompts = [each.all[0].text for each in answers]
    prompt = sum(len(text.request.prompt) for text in prompts)
    added = sum(answer.tokens for each in answers for answer in each.all)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": added,
        "total_tokens": prompt + added,
        "prompt_tokens_details": {"cached_tokens": sum(text.shared for text in prompts)},
    }


def finish_error(finish: str) -> APIError | None:
    """What to answer when a text did not end by itself; None when it did."""
    if finish == "late":
        return APIError(
            "the text waited for too long to start; try again later",
            status=429,
            kind="rate_limit_error",
            code="overloaded",
        )
    if finish in ("failed", "cancelled"):
        return APIError("the server stops, or its device failed; try again later", status=503)
    return None


def new_id(kind: str) -> str:
    """A name for an answer."""
    return f"{kind}-{uuid.uuid4().hex}"
