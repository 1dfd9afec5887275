"""What a cluster runs, without one: rows of texts, the server behind Ray's own ingress, replicas that fail."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from npu_compiler.errors import DeviceError, InputError, MissingDependencyError
from npu_text.serving.server import Served
from tests.support.serving import MODEL, make_service
from tests.support.simulated_engine import SimulatedEngine

pytest.importorskip("pydantic")
MESSAGES = [{"role": "user", "content": "Hello", "name": None}]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model of any folder, on a simulated device."""
    service = make_service()
    for module in ("text_batches", "llm_server", "deployment"):
        monkeypatch.setattr(f"npu_text.ray.{module}.open_model", lambda *_: Served(service, None, None))
    yield service
    service.core.driver.stop()


def text_batches(request: dict[str, Any] | None = None, **options: Any) -> Any:
    from npu_text.ray import TextBatches

    return TextBatches("any", "software-metal", request=request, **options)


def test_rows_are_prompts_tokens_or_conversations(service: Any) -> None:
    batches = text_batches({"max_tokens": 5, "temperature": 0, "ignore_eos": True}, column="what", into="then")
    prompts = np.empty(4, object)
    prompts[:] = ["Hello", np.frombuffer(b"Hello", np.uint8).astype(np.int64), np.array(MESSAGES, object), [999]]
    result = asyncio.run(batches({"what": prompts, "number": np.arange(4)}))
    assert list(result) == ["what", "number", "then", "then_finish", "then_tokens", "then_error"]
    assert result["then_finish"] == ["length", "length", "length", "error"]
    assert result["then_tokens"].tolist() == [5, 5, 5, 0]
    assert "999" in result["then_error"][3]


def test_several_batches_at_once_keep_their_rows(service: Any) -> None:
    batches = text_batches({"max_tokens": 6, "temperature": 0, "ignore_eos": True})

    async def together() -> list[Any]:
        return await asyncio.gather(*(batches({"prompt": [f"{a} {b}" for b in range(5)]}) for a in range(4)))

    several = [answer for batch in asyncio.run(together()) for answer in batch["answer"]]
    service.core.driver.stop()
    assert len(several) == 20
    assert all(several)


def test_no_rows(service: Any) -> None:
    result = asyncio.run(text_batches()({"prompt": np.array([], object)}))
    assert (result["answer"], result["answer_tokens"].tolist()) == ([], [])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"max_token": 5}, "'max_token'.*max_tokens"),
        ({"n": 2}, "'n'"),
        ({"stream": True}, "'stream'"),
        ({"tools": []}, "'tools'"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_fields_that_say_nothing_are_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        text_batches(request_)


def test_a_batch_without_the_column_is_refused(service: Any) -> None:
    with pytest.raises(InputError, match="no column 'prompt', it has text"):
        asyncio.run(text_batches()({"text": ["Hello"]}))


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_text.ray import openai_app

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"npu-compiler\[ray\]"):
        openai_app("any")


class Broken(SimulatedEngine):
    """Fails at once."""

    def prefill(self, *parts: Any) -> Any:
        raise DeviceError("the device is gone")


def test_a_failed_device_stops_the_dataset_and_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_text.ray.deployment import Replica
    from npu_text.serving.server import ServerOptions

    service = make_service(Broken(lanes=1, pages=40, page_tokens=16, context=64))
    for module in ("text_batches", "deployment"):
        monkeypatch.setattr(f"npu_text.ray.{module}.open_model", lambda *_: Served(service, None, None))
    replica = Replica("any", "software-metal", ServerOptions())
    replica.check_health()
    with pytest.raises(DeviceError):
        asyncio.run(text_batches({"max_tokens": 4})({"prompt": ["Hello"]}))
    with pytest.raises(DeviceError, match="the device is gone"):
        replica.check_health()


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Names of the types that Ray takes from vLLM or SGLang, in a place where neither is."""
    pydantic = pytest.importorskip("pydantic")
    module = ModuleType("ray.serve.llm.openai_api_models")
    for name in ("ChatCompletionResponse", "CompletionResponse", "EmbeddingResponse", "ErrorResponse"):
        made = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="allow"))
        setattr(module, name, made)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def asked(**fields: Any) -> Any:
    """A request as Ray's ingress hands it on: with fields beside those that were given."""
    pydantic = pytest.importorskip("pydantic")
    default = {"stream": (bool | None, False), "guided_json": (str | None, "unset")}
    kind = pydantic.create_model("Request", __config__=pydantic.ConfigDict(extra="allow"), **default)
    return kind(model=MODEL, request_id="1", **fields)


Config = Callable[..., Any]


@pytest.fixture(scope="module")
def config() -> Config:
    """Makes Ray's own configurations."""
    pytest.importorskip("ray.serve")
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig

    def make(**fields: Any) -> Any:
        given = {"model_loading_config": {"model_id": MODEL, "model_source": "any"}}
        given |= {"accelerator_config": {"kind": "cpu"}, "engine_kwargs": {"device": "software-metal"}}
        return LLMConfig(**(given | fields), server_cls="npu_text.ray.llm_server.LLMServer")

    return make


def answers(server: Any, method: str, request: Any) -> list[Any]:
    async def all_of() -> list[Any]:
        return [part async for part in await getattr(server, method)(request)]

    return asyncio.run(all_of())


def open_server(config: Any) -> Any:
    return config.server_cls(config)


@pytest.mark.filterwarnings("default")
def test_the_server_answers_as_rays_ingress_wants(service: Any, types: Any, config: Config) -> None:
    server = open_server(config(experimental_configs={"stream_batching_interval_ms": 0}))

    async def all_of(method: str, **fields: Any) -> list[Any]:
        return [part async for part in await getattr(server, method)(asked(**fields))]

    async def everything() -> None:
        await server.check_health()
        prompt: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        (whole,) = await all_of("completions", **prompt)
        assert isinstance(whole, types.CompletionResponse)
        text = whole.choices[0]["text"]
        events = "".join(await all_of("completions", **prompt, stream=True)).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2] if event.startswith("data")]
        assert "".join(part["choices"][0]["text"] for part in parts) == text
        (chat,) = await all_of("chat", messages=MESSAGES, max_tokens=5)
        assert isinstance(chat, types.ChatCompletionResponse)
        assert chat.usage["completion_tokens"] <= 5
        for wrong in ({"max_tokens": 5000}, {"temperature": 7}, {"max_tokens": 5000, "stream": True}):
            (error,) = await all_of("completions", **(prompt | wrong))
            assert isinstance(error, types.ErrorResponse)
            assert error.error["code"] == 400
        for method in ("embeddings", "transcriptions", "score", "tokenize", "detokenize"):
            (error,) = await all_of(method, input="Hello")
            assert error.error["code"] == 400, method
        stream = await server.completions(asked(**prompt | {"max_tokens": 900}, stream=True))
        await anext(stream)
        await stream.aclose()  # the client left
        while any(service.core.driver.status().lanes):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(everything(), 60))


def test_what_a_deployment_asks_of_the_cluster(config: Config) -> None:
    from npu_text.ray.llm_server import LLMServer

    on_cpu = config(deployment_config={"num_replicas": 2}, runtime_env={"env_vars": {"A": "1"}})
    options = LLMServer.get_deployment_options(on_cpu)
    assert options == {"num_replicas": 2, "ray_actor_options": {"runtime_env": {"env_vars": {"A": "1"}}}}
    assert on_cpu.deployment_config == {"num_replicas": 2}
    on_gpu = LLMServer.get_deployment_options(config(accelerator_config={"kind": "gpu"}, accelerator_type="L4"))
    assert on_gpu["ray_actor_options"] == {"num_gpus": 1, "accelerator_type": "L4"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, "'tensor_parallel_size'.*device"),
        ({"lora_config": {}}, "lora_config"),
        ({"model_loading_config": {"model_id": MODEL, "model_source": {"bucket_uri": "s3://a/b"}}}, "path of a folder"),
        ({"placement_group_config": {"bundles": [{"CPU": 1}]}}, "placement_group_config"),
    ],
)
def test_configurations_that_mean_nothing_here_are_refused(config: Config, fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_server(config(**fields))


def test_an_encoder_is_no_dataset_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_text.ray.text_batches.open_model", lambda *_: Served(None, object(), None))
    with pytest.raises(InputError, match="holds an encoder"):
        text_batches()
