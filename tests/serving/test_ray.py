"""docs/cluster.md on a local Ray, and more that is asked of what it has started."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from tests.support.pages import run_page

ray = pytest.importorskip("ray")
for module in ("ray.data", "ray.serve", "pyarrow", "pandas", "fastapi", "llguidance", "prometheus_client", "openai"):
    pytest.importorskip(module)

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
_MEMORY = 80 << 20  # bytes of Ray's store of objects
pytestmark = pytest.mark.filterwarnings("default")  # of Ray, when it starts and ends


@pytest.fixture
def page(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the page has made. Its processes end with the test, and within two minutes with one that is killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it keeps a key in the home folder
        patch.setenv("RAY_raylet_start_wait_time_s", "120")
        patch.chdir(tmp_path)
        try:
            ray.init(num_cpus=2, include_dashboard=False, object_store_memory=_MEMORY, log_to_driver=False)
            names = run_page(PAGE)
            yield names
            names["client"].close()
        finally:
            ray.shutdown()


def alone(prompt: str) -> str:
    """How a text goes on that nobody runs beside."""
    from npu_text.ray import TextBatches

    batches = TextBatches("qwen", request={"max_tokens": 8, "temperature": 0})
    return str(asyncio.run(batches({"prompt": [prompt]}))["answer"][0])


def each_row_has_the_text_that_its_prompt_has_alone(page: dict[str, Any]) -> None:
    rows = page["texts"]
    assert [row["prompt"] for row in rows] == [f"Text {number}" for number in range(12)] + ["long" * 100]
    assert [row["answer"] for row in rows[:12:5]] == [alone(row["prompt"]) for row in rows[:12:5]]
    assert {(row["answer_finish"], row["answer_tokens"], row["answer_error"]) for row in rows[:12]} == {
        ("length", 8, "")
    }
    assert (rows[12]["answer"], rows[12]["answer_finish"]) == ("", "error")
    assert "at most 128 tokens" in rows[12]["answer_error"]


def each_image_has_the_scores_that_pytorch_gives(page: dict[str, Any]) -> None:
    from npu_cli.images import PHOTOGRAPHS, load_image, photograph, preprocess

    rows = {Path(row["path"]).name: row["scores"] for row in page["images"]}
    assert rows.keys() == set(PHOTOGRAPHS)
    pixels = np.concatenate([preprocess(load_image(photograph(name)), 64, 64) for name in rows])
    with torch.no_grad():
        expected = page["resnet"](torch.from_numpy(pixels)).numpy()
    for scores, wanted in zip(rows.values(), expected, strict=True):
        assert np.corrcoef(scores, wanted)[0, 1] > 0.999


def replicas_give_what_each_text_is_alone(page: dict[str, Any]) -> None:
    (deployment,) = page["serve"].status().applications["default"].deployments.values()
    assert deployment.replica_states["RUNNING"] == 2

    def continued(number: int) -> str:
        options = {"model": "qwen", "prompt": f"Text {number}", "max_tokens": 8, "temperature": 0}
        return str(page["client"].completions.create(**options).choices[0].text)

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(continued, range(12)))
    assert together == [row["answer"] for row in page["texts"][:12]]


def errors_are_those_of_the_api(page: dict[str, Any]) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="this server has qwen"):
        page["client"].completions.create(model="other", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="at most 128 tokens"):
        page["client"].completions.create(model="qwen", prompt="long" * 100)


def a_client_that_leaves_frees_its_lane(page: dict[str, Any]) -> None:
    options = {"model": "qwen", "prompt": "Hello", "extra_body": {"ignore_eos": True}}
    with page["client"].completions.create(**options, max_tokens=120, stream=True) as stream:
        next(iter(stream))
    idle, until = 0, time.monotonic() + 60
    while idle < 10 and time.monotonic() < until:  # either replica may answer
        with urlopen(f"http://127.0.0.1:{page['port']}/status") as answer:
            idle = 0 if any(json.load(answer)["lanes"]) else idle + 1
    assert idle == 10


def test_the_page_and_what_it_started(page: dict[str, Any]) -> None:
    """One test: several might be shared out among processes, each of which would start a Ray."""
    each_row_has_the_text_that_its_prompt_has_alone(page)
    each_image_has_the_scores_that_pytorch_gives(page)
    replicas_give_what_each_text_is_alone(page)
    errors_are_those_of_the_api(page)
    a_client_that_leaves_frees_its_lane(page)
