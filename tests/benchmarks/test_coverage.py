"""A tenth of the models of `benchmarks.coverage`: none comes less far than the committed records say."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.coverage.agreement import agreement
from benchmarks.coverage.catalogue import catalogue
from benchmarks.coverage.entry import Built, Entry
from benchmarks.coverage.records import read_records, write_records
from benchmarks.coverage.sums import missing, sums
from benchmarks.coverage.trial import Request, try_model
from benchmarks.coverage.workers import try_models
from docs.generate_models import RESULTS

# Small models, chosen so that between them every family of ops and every kind of model occurs.
TENTH = """
torchvision/mobilenet_v3_small torchvision/shufflenet_v2_x0_5 torchvision/squeezenet1_1 torchvision/mnasnet0_5
torchvision/regnet_y_400mf torchvision/resnet18 torchvision/convnext_tiny torchvision/lraspp_mobilenet_v3_large
torchvision/fasterrcnn_mobilenet_v3_large_320_fpn torchvision/r3d_18
timm/resnet10t timm/convnext_atto timm/ghostnet_050 timm/levit_128s timm/mobilevit_xxs timm/mobilevitv2_050
timm/starnet_s050 timm/edgenext_xx_small timm/nest_tiny timm/nf_resnet26 timm/vit_tiny_patch16_224
timm/xcit_nano_12_p16_224 timm/gmlp_ti16_224 timm/resnest14d timm/tinynet_e timm/cs3darknet_s timm/poolformer_s12
timm/vit_relpos_small_patch16_224
transformers/bert transformers/fnet transformers/convbert transformers/deberta transformers/nystromformer
transformers/gpt2 transformers/llama transformers/gemma2 transformers/falcon transformers/mpt transformers/bloom
transformers/lfm2 transformers/qwen3_moe transformers/falcon_mamba transformers/mamba transformers/t5
transformers/bart transformers/whisper transformers/wav2vec2 transformers/speecht5_hifigan:SpeechT5HifiGan
transformers/segformer transformers/clip transformers/layoutlm transformers/patchtst transformers/vit
"""
RUN = ("torchvision/squeezenet1_1", "transformers/bert-generation")
_LIMIT = 120.0


def recorded() -> dict[str, dict[str, Any]]:
    """The committed records of the tenth's models that are installed here."""
    _, records = read_records(RESULTS)
    names = [name for name in TENTH.split() if find_spec(name.partition("/")[0]) is not None]
    return {name: records[name] for name in names if "nodes_on_device" in records.get(name, {})}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", recorded())
def test_a_model_comes_as_far_as_recorded(name: str) -> None:
    """All in one process: the first export of each takes a second, which the benchmark spends on every model."""
    known = {left["op"] for left in recorded()[name]["left"]}
    record = try_model(catalogue()[name], Request("cuda", "partition"))
    assert "error" not in record, record
    assert record["status"] == "partition"
    assert {left["op"] for left in record["left"]} <= known


def test_the_tenth_is_a_tenth() -> None:
    names = TENTH.split()
    assert len(names) == len(set(names))
    assert 10 * len(names) >= len(catalogue())
    assert set(names) <= catalogue().keys()


@pytest.mark.parametrize("name", RUN)
def test_models_run(name: str) -> None:
    (record,) = try_models([name], Request("software-metal", "run"), 1, _LIMIT)
    assert "error" not in record, record
    assert record["r"] > 0.999
    assert record["mismatched"] == 0
    assert record["nodes_on_device"] == record["nodes"]
    assert record["launches"] > 0


def test_a_model_that_takes_too_long_stops_no_other() -> None:
    records = {record["name"]: record for record in try_models(["torchvision/alexnet"], Request("cuda", "run"), 1, 0.0)}
    assert records["torchvision/alexnet"]["error"]["type"] == "TimeLimit"


def test_messages_are_the_same_in_each_run() -> None:
    def build() -> Built:
        raise ValueError(f"given {object()!r}, whose number is {1 << 46}, in 4096 places")

    error = try_model(Entry("a/broken", "none", build), Request("cuda", "partition"))["error"]
    assert error["message"] == "given <object object at …>, whose number is …, in 4096 places"


def test_agreement_is_the_lowest_correlation() -> None:
    x = np.linspace(-1, 1, 100, dtype=np.float32)
    assert agreement([x, x], [2 * x, x]).r == pytest.approx(1)
    assert agreement([x, x], [x, -x]).r == pytest.approx(-1)
    assert agreement([np.array([4.0])], [np.array([3.0])]).r == pytest.approx(0.75)


def test_what_has_to_be_equal_is_counted() -> None:
    ids, masked = np.arange(4), np.array([0.0, -np.inf, 1.0, 2.0])
    assert agreement([ids], [np.array([0, 1, 3, 3])]).mismatched == 1
    assert agreement([masked], [np.array([0.0, -7.0, 1.0, 2.0])]).mismatched == 1
    with pytest.raises(ValueError, match="expected"):
        agreement([ids], [ids[:3]])


def record(name: str, on_device: int, **fields: Any) -> dict[str, Any]:
    left = [{"op": "aten.sort.default", "reason": "none", "nodes": 4 - on_device}] if on_device < 4 else []
    seconds = {"extract": 1.0}
    return {
        "name": name,
        "status": "run",
        "nodes": 4,
        "nodes_on_device": on_device,
        "left": left,
        "seconds": seconds,
    } | fields


def test_sums_and_what_is_missing() -> None:
    records = [
        record("a/one", 4, r=0.9999, mismatched=0),
        record("a/two", 3, r=0.95, r_of_half=0.95, mismatched=0),
        record("a/three", 2, r=0.5, r_of_half=0.999, mismatched=0),
        {"name": "a/refused", "status": "built", "seconds": {"extract": 1}, "error": {"type": "ExtractionError"}},
        {"name": "a/broken", "status": "extract", "seconds": {"extract": 1}, "error": {"type": "IRError"}},
        {"name": "a/absent", "status": "absent", "seconds": {}, "error": "too new"},
    ]
    found = sums(records)
    assert (found.models, found.refused, found.errors, found.whole) == (5, 1, 1, 1)
    assert (found.nodes, found.nodes_on_device, found.ran, found.wrong) == (12, 9, 3, 1)
    assert [(each.op, len(each.models), each.nodes) for each in missing(records)] == [("aten.sort.default", 2, 3)]


def test_reasons_that_differ_by_names_and_numbers_are_one() -> None:
    reasons = ["'mul_7' has 2147483648 elements, kernels address fewer than 2^31", "'mul_9' has 4 elements"]
    reasons.append(reasons[0].replace("mul_7", "mul_12"))
    left = [{"op": "aten.mul.Tensor", "reason": reason, "nodes": 2} for reason in reasons]
    found = missing([{"name": "a/one", "left": left}])
    assert [(each.models, each.nodes, each.reason) for each in found] == [
        (("a/one",), 4, reasons[0]),
        (("a/one",), 2, reasons[1]),
    ]


def test_records_survive_a_run_that_stops(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    assert read_records(path) == ({}, {})
    write_records(path, {"device": "cuda"}, {"b": {"name": "b"}, "a": {"name": "a"}})
    assert [each["name"] for each in json.loads(path.read_text())["models"]] == ["a", "b"]
    assert read_records(path) == ({"device": "cuda"}, {"a": {"name": "a"}, "b": {"name": "b"}})
    assert list(tmp_path.iterdir()) == [path]


def test_every_model_has_a_name_of_its_own() -> None:
    sources = ("torchvision", "timm", "transformers")
    modules = [importlib.import_module(f"benchmarks.coverage.{source}_models") for source in sources]
    counts = {}
    for source, module in zip(sources, modules, strict=True):
        names = [entry.name for entry in module.entries()]
        assert len(names) == len(set(names))
        assert all(name.startswith(f"{source}/") for name in names)
        counts[source] = len(names)
    assert counts["torchvision"] >= 90
    assert counts["timm"] >= 100
    assert counts["transformers"] >= 80
