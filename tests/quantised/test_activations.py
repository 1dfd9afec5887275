"""Decoders whose linears round what they multiply: by the option, by what a checkpoint says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_cli.main import main
from npu_compiler.errors import ExtractionError
from npu_runtime import Device, Generator
from tests.quantised.test_decoders import TOKENS
from tests.quantised.test_quantising import quantised
from tests.support.quantised import write_checkpoint

KINDS = {"fp8": "float8_e4m3fn", "int8": "int8"}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one model by what their weights are."""
    place = tmp_path_factory.mktemp("sources")
    write_checkpoint(place / "16", {}, lambda name, weight: None, torch.bfloat16, num_hidden_layers=1)
    for weights, group in (("fp8", None), ("int8", None), ("int4", 32)):
        quantised(place / "16", place / weights, weights, group)
    return {name: place / name for name in ("16", "fp8", "int8", "int4")}


def extracted(source: Path, target: Path, activations: str | None = None) -> Path:
    from npu_compiler.frontend.decoder_request import RoundingRequest
    from npu_compiler.frontend.language_model import extract_language_model

    extract_language_model(source, target, cache_length=64, prefill=(8,), rounding=RoundingRequest(activations))
    return target


def rounded(folder: Path) -> list[str]:
    """The types of codes that the nodes of a prefill round to."""
    nodes = json.loads((folder / "prefill_8.json").read_text())["nodes"]
    return [node["attrs"]["dtype"] for node in nodes if node["op_type"].startswith("npu_codes.quantize")]


def loaded(source: Path, activations: str | None = None) -> Any:
    """The model in PyTorch."""
    from npu_compiler.frontend.decoder_source import load_decoder

    return load_decoder(source, None, 0, activations)


def rounding(model: Any) -> int:
    """How many linears round what they multiply."""
    return sum(getattr(module, "activations", None) is not None for module in model.modules())


def with_activations(source: Path, target: Path, activations: dict[str, Any]) -> Path:
    """The checkpoint, which says itself what activations are."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    content = json.loads((source / "config.json").read_text())
    for group in content["quantization_config"]["config_groups"].values():
        group["input_activations"] = activations
    (target / "config.json").write_text(json.dumps(content))
    return target


@each_kind
def test_logits_are_those_of_rounded_activations(
    kind: str, sources: dict[str, Path], tmp_path: Path, device: Device
) -> None:
    folder = extracted(sources[kind], tmp_path / "model", kind)
    sequence = Generator(folder, device).model.begin()
    row: Any = sequence.advance(TOKENS)
    given = np.asarray(row).astype(np.float32).reshape(-1)
    with torch.no_grad():
        model = loaded(sources[kind], kind)
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, -1].float().numpy()
    assert np.corrcoef(given, wanted)[0, 1] > 0.999
    assert len(rounded(folder)) == 7  # linears of a layer; the output layer multiplies one row, in 16 bits
    assert {name.removeprefix("torch.") for name in rounded(folder)} == {KINDS[kind]}


@each_kind
def test_checkpoints_say_what_activations_are(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    dynamic = {"num_bits": 8, "type": "float" if kind == "fp8" else "int", "symmetric": True, "dynamic": True}
    source = with_activations(sources[kind], tmp_path / "source", dynamic | {"strategy": "token"})
    assert rounding(loaded(source)) == 7
    assert not rounding(loaded(source, "16"))
    static = with_activations(sources[kind], tmp_path / "static", dynamic | {"dynamic": False, "strategy": "tensor"})
    assert not rounding(loaded(static))


@pytest.mark.parametrize(
    ("weights", "activations", "expected"),
    [
        ("int4", "fp8", "of which none are of that type"),
        ("int8", "fp8", "of which none are of that type"),
        ("16", "int8", "run npu quantize first"),
        ("fp8", "fp4", "expected one of fp8, int8, 16"),
    ],
)
def test_activations_that_no_weight_meets_are_refused(
    weights: str, activations: str, expected: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ExtractionError, match=expected):
        extracted(sources[weights], tmp_path / "model", activations)


def test_the_command_takes_them(sources: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["extract-llm", str(sources["fp8"]), "-o", str(tmp_path / "model"), "--cache", "64", "--prefill", "8"]
    assert main([*arguments, "--activations", "fp8"]) == 0
    assert rounded(tmp_path / "model")
