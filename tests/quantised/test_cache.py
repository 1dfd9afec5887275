"""Caches of keys and values in codes of a byte: attention over them, decoders that keep them, and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_cli.main import main
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.errors import ExtractionError, InputError
from npu_compiler.frontend.decoder_request import RoundingRequest
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedPages, CodedRows
from npu_runtime import Device, Executor, Generator, NPUBuffer
from tests.support.coded_cache import CodedStep, Sizes, check_step
from tests.support.decoders import config, import_transformers
from tests.support.paged_steps import PagedStep, check_paged_step, compiled_step, run_step, step_inputs
from tests.support.paged_steps import Sizes as PagedSizes
from tests.support.reference_target import plan_ir

PROMPT = [5, 17, 40, 3, 8, 250, 31, 77, 9, 120]
SIZE = 32  # of a head

each_kind = pytest.mark.parametrize("kind", ["int8", "fp8"])


@each_kind
@pytest.mark.parametrize(
    ("sizes", "positions"),
    [
        (Sizes(300, groups=4, shared=8), [150]),
        (Sizes(2100, size=32, shared=1), [2050]),  # parts of the positions, which a second launch puts together
        (Sizes(130, size=20, groups=4, shared=8), [120]),  # rows of no whole chunks
        (Sizes(130, rows=40), [90]),
    ],
    ids=str,
)
def test_attention_over_codes_errs_as_over_16_bits(
    kind: str, sizes: Sizes, positions: list[int], device: Device
) -> None:
    check_step(sizes, kind, torch.float16, positions, device)


@each_kind
def test_bfloat16(kind: str, device: Device) -> None:
    check_step(Sizes(200, groups=4, shared=8), kind, torch.bfloat16, [150], device)


@each_kind
def test_attention_reads_codes_and_scales(kind: str) -> None:
    step = CodedStep(Sizes(64), kind)
    plan = plan_ir(npu_compiler.extract(step, step.inputs(3)).ir)
    (attention,) = (group.problem for group in plan.groups if isinstance(group.problem, Attention))
    assert isinstance(attention.k, CodedRows)
    assert isinstance(attention.v, CodedRows)
    assert attention.k.scale.strides[3] == 0
    assert len(plan.plan.state) == 4  # codes and scales are updated in place
    assert not plan.plan.notes


@each_kind
def test_attention_reads_codes_and_scales_in_pages(kind: str) -> None:
    step = PagedStep(PagedSizes(2, 3, 64, 32), kind)
    plan = plan_ir(npu_compiler.extract(step, step_inputs(step, [0, 0])).ir)
    (attention,) = (group.problem for group in plan.groups if isinstance(group.problem, Attention))
    k, v = attention.k, attention.v
    assert isinstance(k, CodedPages)
    assert isinstance(v, CodedPages)
    assert (k.page, k.stride, k.scale_stride, k.scale.strides) == (64, 2 * 64 * 32, 2 * 64, (0, 64, 1, 0))
    assert len(plan.plan.state) == 4
    assert not plan.plan.notes


@each_kind
@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        (PagedSizes(3, 3, 32, 32, 2, 3, pages=10), [[70, -1, 31], [0, 95, 64]]),
        (PagedSizes(2, 3, 64, 64, 1, 4, rows=3, pages=7), [[150, 66]]),
        (PagedSizes(1, 4, 32, 20, 2, 2, rows=40, pages=5), [[39], [101]]),
        (PagedSizes(1, 4, 512, 32, 1, 1, pages=5), [[2047]]),  # positions are shared out
        (PagedSizes(2, 4, 24, 32, 2, 2, pages=9), [[70, 50]]),  # pages of no whole blocks are gathered
    ],
    ids=str,
)
def test_attention_over_pages_of_codes(kind: str, sizes: PagedSizes, cases: list[list[int]], device: Device) -> None:
    step = PagedStep(sizes, kind, torch.float16)
    executor = Executor(compiled_step(step, device.target), device)
    for ends in cases:
        check_paged_step(executor, step, step_inputs(step, ends, shares=True), device)


@each_kind
@pytest.mark.parametrize("page", [11, -12, 1 << 30], ids=str)
def test_a_page_that_there_is_none_of(kind: str, page: int, device: Device) -> None:
    step = PagedStep(PagedSizes(1, 3, 32, 32, pages=10), kind, torch.float16)
    executor = Executor(compiled_step(step, device.target), device)
    given = step_inputs(step, [70])
    given["tables"][0, 1] = page
    with pytest.raises(InputError, match="tables"):
        run_step(executor, given, device)
    check_paged_step(executor, step, step_inputs(step, [70]), device)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("source")
    import_transformers()
    config("Qwen2", num_hidden_layers=2, hidden_size=128, num_attention_heads=4).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def generators(source: Path, tmp_path_factory: pytest.TempPathFactory, device: Device) -> Any:
    from npu_compiler.frontend.language_model import extract_language_model

    @cache
    def made(kind: str) -> Generator:
        folder = tmp_path_factory.mktemp("model")
        extract_language_model(source, folder, cache_length=64, rounding=RoundingRequest(kv_cache=kind), prefill=(8,))
        return Generator(folder, device)

    return made


def logits(generator: Generator, tokens: list[int]) -> Any:
    """After the prompt as a prefill, all others as decode steps."""
    sequence = generator.model.begin()
    sequence.advance(tokens[:8])
    row: Any = sequence.advance(tokens[8:])
    return np.asarray(row).astype(np.float32).reshape(-1)


def test_logits_of_int8_are_those_of_16_bits(generators: Any) -> None:
    assert np.corrcoef(logits(generators("int8"), PROMPT), logits(generators("16"), PROMPT))[0, 1] > 0.999


def test_logits_of_fp8_are_near_those_of_16_bits(generators: Any) -> None:
    assert np.corrcoef(logits(generators("fp8"), PROMPT), logits(generators("16"), PROMPT))[0, 1] > 0.99


@each_kind
def test_texts_part_at_near_ties_alone(kind: str, generators: Any) -> None:
    coded, plain = ([token.id for token in generators(name).generate(PROMPT, 24)] for name in (kind, "16"))
    first = next((i for i, (a, b) in enumerate(zip(coded, plain, strict=True)) if a != b), None)
    if first is None:
        return
    before = [*PROMPT, *plain[:first]]
    given, wanted = logits(generators(kind), before), logits(generators("16"), before)
    assert wanted[plain[first]] - wanted[coded[first]] <= 2 * np.abs(given - wanted).max()


@each_kind
def test_the_cache_takes_a_byte_for_each_number_and_four_for_each_row(kind: str, generators: Any) -> None:
    sizes = {
        name: sum(each.spec.nbytes for each in generators(name).model.begin().caches if isinstance(each, NPUBuffer))
        for name in (kind, "16")
    }
    assert sizes[kind] * 2 * SIZE == sizes["16"] * (SIZE + 4)


@each_kind
def test_each_function_updates_codes_and_scales_in_place(kind: str, generators: Any) -> None:
    model = generators(kind).model
    for name, step in model.spec.functions.items():
        assert {*model.functions.program.functions[name].state} == {(new, old) for old, new in step.caches}


def test_folders_say_what_caches_are(generators: Any, source: Path, tmp_path: Path) -> None:
    spec: GenerationSpec = generators("int8").model.spec
    assert spec.caches[:2] == [((1, 2, 64, SIZE), "int8"), ((1, 2, 64, 1), "float32")]
    assert {kind for _, kind in generators("16").model.spec.caches} == {"bfloat16"}
    arguments = ["extract-llm", str(source), "-o", str(tmp_path / "m"), "--cache", "16", "--prefill", "8"]
    assert main([*arguments, "--kv-cache-dtype", "fp8"]) == 0
    assert GenerationSpec.load(tmp_path / "m").cache_dtypes[:2] == ("float8_e4m3fn", "float32")


def test_what_has_no_such_cache_is_refused(source: Path, tmp_path: Path) -> None:
    from npu_compiler.frontend.language_model import extract_language_model

    with pytest.raises(ExtractionError, match="given kv_cache_dtype='int4', expected one of int8, fp8, 16"):
        extract_language_model(source, tmp_path / "m", rounding=RoundingRequest(kv_cache="int4"))
    assert not (tmp_path / "m").exists()
