"""Clients that nobody here wrote: LangChain, schemathesis, the evaluation harness of EleutherAI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import MODEL, Server, make_tokenizer, serve

CHECKS = (
    *("status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "negative_data_rejection"),
)
pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages do among themselves


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


def test_langchain(server: Server) -> None:
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    pydantic = pytest.importorskip("pydantic")
    model: Any = chat_openai(model=MODEL, base_url=f"{server.url}/v1", api_key="any", max_tokens=200, seed=3)
    assert model.invoke("Hello").usage_metadata["total_tokens"] > 0
    chunks = list(model.stream("Hello", stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.content == model.invoke("Hello").content
    assert whole.usage_metadata["output_tokens"] > 0
    kind = pydantic.create_model("Weather", city=(str, pydantic.Field(max_length=3)), __doc__="Of a city")
    called = model.bind_tools([kind], tool_choice="Weather", parallel_tool_calls=False).invoke("Hello")
    assert called.tool_calls[0]["name"] == "Weather"
    pieces = [*model.bind_tools([kind], tool_choice="any", parallel_tool_calls=False).stream("Hello")]
    assert pieces[0].__add__(pieces[1]) is not None
    small = pydantic.create_model("Small", yes=(bool, ...))
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(small, method=method).invoke("Hello"), small)
    assert len(model.batch(["a", "b", "c"])) == 3


def test_descriptions_hold(server: Server) -> None:
    """Random requests, valid and not, to everything that the description names: no error of the server's own, no answer
    that the description does not know."""
    schemathesis: Any = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings

    described: Any = pytest.importorskip("schemathesis.specs.openapi.checks")
    # Not that all that fits the description is accepted: a description knows no names of models, nor what fits a cache.
    held = [schemathesis.checks.not_a_server_error, *(getattr(described, name) for name in CHECKS)]
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    names = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        names.add(operation.path)

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body and "max_tokens" in case.body:
                case.body["model"] = MODEL
            case.call_and_validate(timeout=30, checks=held)

        check()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= names
    assert server.service.core.driver.status().failure == ""


def test_evaluation_harness(server: Server, tmp_path: Path) -> None:
    """Its log-likelihoods are those of the device."""
    evaluator = pytest.importorskip("lm_eval")
    manager: Any = pytest.importorskip("lm_eval.tasks").TaskManager

    (tmp_path / "data.json").write_text(
        "\n".join(json.dumps({"q": f"Question {n}?", "a": [" yes", " no"], "gold": n % 2}) for n in range(4))
    )
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny_choice\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path}/data.json\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{a}}'\n"
        "doc_to_target: gold\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n"
    )
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    results = evaluator.simple_evaluate(
        model="local-completions",
        model_args=f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={tmp_path},"
        "tokenizer_backend=huggingface,num_concurrent=2,max_length=1000",
        tasks=["tiny_choice"],
        task_manager=manager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
    )
    sample = results["samples"]["tiny_choice"][0]
    for (answer, _), (told, _) in zip([(" yes", 0), (" no", 0)], sample["filtered_resps"], strict=True):
        prompt = server.service.vocabulary.encode("Question 0?", special=False)
        tokens = server.service.vocabulary.encode(answer, special=False)
        expected = 0.0
        for place, token in enumerate(tokens):
            logits = server.engine.logits([*prompt, *tokens[:place]]).astype(np.float64)
            expected += logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert float(told) == pytest.approx(expected, abs=1e-4)
