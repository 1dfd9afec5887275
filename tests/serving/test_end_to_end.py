"""A small random Qwen2 on the software GPU, served: many clients at once, and what they get."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_cli.main import main
from npu_runtime import Device
from tests.support.decoders import Decoder, config, dtype_errors, import_transformers
from tests.support.serving import CHAT, make_tokenizer, running

pytestmark = pytest.mark.usefixtures("openai")
CLIENTS = 16


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    place = tmp_path_factory.mktemp("qwen")
    import_transformers()
    from npu_compiler.frontend.decoder_request import BatchRequest
    from npu_compiler.frontend.decoder_source import load_decoder
    from npu_compiler.frontend.language_model import extract_language_model

    config("Qwen2").save_pretrained(place / "source")
    batch = BatchRequest(lanes=(1, CLIENTS), page_tokens=32, chunks=(32, 128))
    extract_language_model(place / "source", place / "model", cache_length=128, prefill=(32,), batch=batch)
    make_tokenizer().save(str(place / "model" / "tokenizer.json"))
    (place / "model" / "chat_template.jinja").write_text(CHAT)
    return Decoder(place / "model", load_decoder(place / "source", None, 0))


@pytest.fixture(scope="module")
def client(openai: Any, qwen: Decoder) -> Iterator[Any]:
    for module in ("fastapi", "llguidance", "prometheus_client", "jinja2"):
        pytest.importorskip(module)
    from npu_text.serving.server import ServerOptions, open_app

    app = open_app(qwen.folder, Device("software-metal"), ServerOptions(name="qwen"))
    with running(app) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)


@contextlib.contextmanager
def process(folder: Path, device: str = "software-metal") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`npu serve` as users start it, and its address."""
    command = [sys.executable, "-m", "npu_cli", "serve", str(folder), "--port", "0", "--device", device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server, server.stdout.readline().split()[0]
        finally:
            server.kill()


def test_a_server_that_was_killed_starts_again_and_stops_when_told(openai: Any, qwen: Decoder) -> None:
    texts = []
    for signal_ in (signal.SIGKILL, signal.SIGTERM):
        with process(qwen.folder) as (server, url):
            with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
                options: Any = {"model": "model", "prompt": "Hello", "temperature": 0}
                texts.append(client.completions.create(**options, max_tokens=20).choices[0].text)
                stream = client.completions.create(**options, max_tokens=100, stream=True)
                next(iter(stream))
                server.send_signal(signal_)
                if signal_ == signal.SIGTERM:
                    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
            assert server.wait(60) == (0 if signal_ == signal.SIGTERM else -signal.SIGKILL)
    assert texts[0] == texts[1]


def test_who_interrupts_twice_reads_no_traceback() -> None:
    script = (
        "import fastapi, signal; from npu_text.serving.server import run\n"
        "run(fastapi.FastAPI(), '127.0.0.1', 0, lambda _: [signal.raise_signal(signal.SIGINT) for _ in range(2)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_devices_behind_one_server(openai: Any, qwen: Decoder) -> None:
    pytest.importorskip("aiohttp")
    with process(qwen.folder, "software-metal,software-metal") as (server, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
            options: Any = {"model": "model", "prompt": "Hello", "temperature": 0, "extra_body": {"ignore_eos": True}}
            with ThreadPoolExecutor(8) as pool:
                count = 20
                answers = pool.map(lambda _: client.completions.create(**options, max_tokens=count), range(8))
                assert len({answer.choices[0].text for answer in answers}) == 1
            stream = client.completions.create(**options, max_tokens=100, stream=True)
            next(iter(stream))
            server.send_signal(signal.SIGINT)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.wait(60) == 0


def test_chat_on_a_terminal(qwen: Decoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd?\n"))
    options = ["--max-tokens", "5", "--temperature", "0", "--system", "Be brief", "--device", "software-metal"]
    assert main(["chat", str(qwen.folder), *options]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "nowhere"], "is no folder"),
        (["serve", ".", "--port", "99999"], "expected 0 to 65535"),
        (["serve", "."], "tokenizer.json"),
        (["chat", "nowhere"], "generation.json"),
    ],
)
def test_refusals_of_the_command_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err.replace("\n", "")


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * at) % 256 for at in range(20 + number)]


def continued(client: Any, number: int, count: int = 72) -> str:
    """The text that follows a prompt."""
    answer = client.completions.create(
        model="qwen", prompt=prompt(number), max_tokens=count, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == count
    return str(answer.choices[0].text)


def test_many_clients_get_what_each_gets_alone_and_three_times_as_fast(client: Any, qwen: Decoder) -> None:
    continued(client, 0)
    ratios: list[float] = []
    while len(ratios) < 4 and max(ratios, default=0.0) < 3:  # others may have the machine meanwhile
        started = time.perf_counter()
        alone = [continued(client, number) for number in range(CLIENTS)]
        one_by_one = time.perf_counter() - started
        with ThreadPoolExecutor(CLIENTS) as pool:
            started = time.perf_counter()
            together = list(pool.map(lambda number: continued(client, number), range(CLIENTS)))
            ratios.append(one_by_one / (time.perf_counter() - started))
        assert together == alone
    assert max(ratios) >= 3, ratios


def test_echo_with_logprobs_is_pytorchs(client: Any, qwen: Decoder) -> None:
    """What evaluations read: whole prompts with the log-probability of each token, many at once."""
    prompts = [prompt(number) for number in range(0, 60, 12)]
    options: Any = {"model": "qwen", "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    choices = client.completions.create(**options).choices
    for tokens, choice in zip(prompts, choices, strict=True):
        told, expected = choice.logprobs, torch.log_softmax(qwen.logits(tokens).double(), -1)
        errors = 4 * dtype_errors(qwen, tokens) + 1e-5
        assert told.token_logprobs[0] is None
        assert len(told.token_logprobs) == len(tokens)
        for place, logprob in enumerate(told.token_logprobs[1:]):
            assert abs(logprob - float(expected[place, tokens[place + 1]])) <= errors[place]
            (best,) = told.top_logprobs[place + 1].values()
            assert abs(best - float(expected[place].max())) <= errors[place]
    (one,) = client.completions.create(**options | {"prompt": prompts[1], "max_tokens": 5, "temperature": 0}).choices
    assert one.logprobs.token_logprobs[: len(prompts[1])] == choices[1].logprobs.token_logprobs
    assert one.text.startswith(choices[1].text)
    assert len(one.logprobs.tokens) == len(prompts[1]) + 5


def test_ways_of_choosing_alone_and_in_company(client: Any) -> None:
    """Seeded draws, penalties, biases, masks and log-probabilities, each text with ways of its own."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [True, False]}}}
    ways: list[Any] = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "seed": 4, "top_p": 0.9, "frequency_penalty": 1.0},
        {"temperature": 0, "logit_bias": {"70": 100}},
        {"temperature": 0.5, "seed": 3, "extra_body": {"response_format": schema}},
        {"temperature": 0, "logprobs": 3},
    ]

    def one(way: Any) -> Any:
        return client.completions.create(model="qwen", prompt=prompt(1), max_tokens=12, **way).choices[0]

    alone = [one(way) for way in ways]
    with ThreadPoolExecutor(len(ways)) as pool:
        together = list(pool.map(one, ways))
    assert [choice.text for choice in together] == [choice.text for choice in alone]
    assert alone[0].text != alone[1].text
    assert json.loads(alone[3].text) in (True, False)
    assert len(alone[4].logprobs.top_logprobs[0]) == 3
