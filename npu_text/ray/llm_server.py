"""A model as a server of `ray.serve.llm`, for applications that Ray's own ``build_openai_app`` builds.

``LLMConfig(server_cls="npu_text.ray.llm_server.LLMServer", ...)`` names it. Ray takes the types of requests and answers
from vLLM or SGLang, so one of them has to be installed; `npu_text.ray.openai_app` needs neither.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from npu_compiler.errors import InputError, NPUError
from npu_runtime.device import Device
from npu_text.serving.chat import Chat
from npu_text.serving.completions import Completion
from npu_text.serving.embeddings import Embedder, Embeddings
from npu_text.serving.errors import APIError, api_error, field_error
from npu_text.serving.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from npu_text.serving.server import Served, ServerOptions, open_model, prefer_texts
from npu_text.serving.service import Service

__all__ = ["LLMServer"]

_EVENTS_SECONDS = 0.02  # between two messages of a stream: each is a call from process to process
_OF_THE_ENGINE = {"device", "patience", "temperature"}
_NOT_THERE = "this engine answers chats, completions and embeddings"


class LLMServer:
    """One replica of a model behind Ray's ingress; has the methods of `ray.serve.llm.LLMServer`.

    Of an `LLMConfig` it takes ``model_loading_config`` (``model_id``, the name; ``model_source``, the folder that
    ``npu extract-llm --lanes`` made, by a path that every machine has), ``engine_kwargs`` (``device``, ``patience`` and
    ``temperature``, as `openai_app` and `ServerOptions` have them), ``deployment_config``, ``accelerator_type``,
    ``runtime_env`` and, of ``experimental_configs``, ``stream_batching_interval_ms``.
    """

    def __init__(self, llm_config: Any) -> None:
        """Opens the model; where the replica runs.

        Raises:
            InputError: The configuration asks for what is not supported.
            NPUError: As `open_model`.
        """
        _check(llm_config)
        self._config = llm_config
        milliseconds = llm_config.experimental_configs.get("stream_batching_interval_ms")
        self._pause = _EVENTS_SECONDS if milliseconds is None else milliseconds / 1000
        self._reader = ThreadPoolExecutor(1, "requests")  # as in `serving.app`: one thread
        loading, settings = llm_config.model_loading_config, dict(llm_config.engine_kwargs)
        device = Device.of(settings.pop("device", None))
        options = ServerOptions(name=llm_config.model_id, **settings)
        self._model: Served = open_model(Path(loading.model_source or llm_config.model_id), device, options)
        prefer_texts()
        self._is_running = False

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Options of the deployment: those of the configuration, with a GPU for each replica unless it says
        ``accelerator_config={"kind": "cpu"}``.

        Raises:
            InputError: The configuration asks for what is not supported.
        """
        _check(llm_config)
        options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        actor = options.setdefault("ray_actor_options", {})
        if llm_config.accelerator_config.kind != "cpu":
            actor.setdefault("num_gpus", 1)
        if llm_config.accelerator_type:
            actor.setdefault("accelerator_type", llm_config.accelerator_type)
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return options

    async def start(self) -> None:
        """Starts the engine; the first request does, too."""
        if not self._is_running and self._model.service is not None:
            self._is_running = True
            self._model.service.core.start()

    async def check_health(self) -> None:
        """Ray starts another replica in the place of one whose device failed.

        Raises:
            DeviceError: It did.
        """
        self._model.check()

    async def llm_config(self) -> Any:
        """The configuration."""
        return self._config

    async def record_routing_stats(self) -> dict[str, Any]:
        """Nothing that a router has to know."""
        return {}

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Gives the answer to a chat: events of a stream, or one ``ChatCompletionResponse``; an ``ErrorResponse`` in
        their place where it cannot be answered."""
        from ray.serve.llm.openai_api_models import ChatCompletionResponse

        return self._answer(lambda fields: Chat(self._texts, ChatRequest(**fields)), request, ChatCompletionResponse)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """As `chat`, for texts that go on from a prompt: ``CompletionResponse``."""
        from ray.serve.llm.openai_api_models import CompletionResponse

        return self._answer(
            lambda fields: Completion(self._texts, CompletionRequest(**fields)), request, CompletionResponse
        )

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """As `chat`, for the vectors of texts: ``EmbeddingResponse``."""
        from ray.serve.llm.openai_api_models import EmbeddingResponse

        return self._answer(
            lambda fields: Embeddings(self._encoder, EmbeddingRequest(**fields)), request, EmbeddingResponse
        )

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """An ``ErrorResponse``, as are `score`, `tokenize` and `detokenize`."""
        return _refusal()

    score = tokenize = detokenize = transcriptions

    @property
    def _texts(self) -> Service:
        if self._model.service is None:
            raise APIError("this model is an encoder; use /v1/embeddings", param="model")
        service: Service = self._model.service
        return service

    @property
    def _encoder(self) -> Embedder:
        if self._model.embedder is None:
            raise APIError("this model is none for embeddings", param="model")
        embedder: Embedder = self._model.embedder
        return embedder

    async def _answer(
        self, make: Callable[[dict[str, Any]], Any], request: BaseModel, response: type[BaseModel]
    ) -> AsyncIterator[Any]:
        await self.start()
        fields = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
        try:
            asked = await asyncio.get_running_loop().run_in_executor(self._reader, make, fields)
            if not fields.get("stream"):
                yield response.model_validate(await asked.whole())
                return
            events = asked.stream()
            first = await anext(events)
        except (APIError, NPUError, ValidationError) as error:
            yield _told(error)
            return
        yield first
        async with aclosing(_together(events, self._pause)) as parts:
            async for part in parts:
                yield part


async def _together(events: AsyncGenerator[str], seconds: float) -> AsyncGenerator[str]:
    """Events that come within so many seconds, as one string."""
    queue: asyncio.Queue[str | None] = asyncio.Queue()

    async def read() -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    queue.put_nowait(event)
        finally:
            queue.put_nowait(None)

    reading = asyncio.create_task(read())
    try:
        ended = False
        while not ended:
            parts = [await queue.get()]
            while not queue.empty():
                parts.append(queue.get_nowait())
            ended = parts[-1] is None
            yield "".join(part for part in parts if part)
            await asyncio.sleep(0 if ended else seconds)
        await reading
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def _refusal() -> AsyncIterator[Any]:
    yield _told(APIError(_NOT_THERE))


def _told(error: APIError | NPUError | ValidationError) -> Any:
    """An error as Ray's ingress takes it."""
    from ray.serve.llm.openai_api_models import ErrorResponse

    if isinstance(error, ValidationError):
        error = field_error(error.errors())
    elif isinstance(error, NPUError):
        error = api_error(error)
    body = error.body["error"] | {"code": error.status}
    return ErrorResponse.model_validate({"error": body})


def _check(config: Any) -> None:
    """Refuses what nothing would be done about."""
    wrong = next((name for name in config.engine_kwargs if name not in _OF_THE_ENGINE), None)
    if wrong is not None:
        raise InputError(f"given engine_kwargs with '{wrong}', expected some of {', '.join(sorted(_OF_THE_ENGINE))}")
    source = config.model_loading_config.model_source
    if source is not None and not isinstance(source, str):
        raise InputError(f"given a {type(source).__name__} as model_source, expected the path of a folder")
    for name in ("lora_config", "placement_group_config"):
        if getattr(config, name) is not None:
            raise InputError(f"given {name}, which this engine has no use for; leave it out")
