"""Writes tables and pictures of the benchmark pages and READMEs from `benchmarks/results/*.json`.

Run it as ``python -m docs.generate_figures``. A picture is written as text by `docs.line_chart`, so that a test tells
whether it is current, and nothing has to be installed to draw it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs import cuda_figures

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "benchmarks" / "results"
LANGUAGES = {"benchmarks.md": 0, "benchmarks.ko.md": 1, "../README.md": 0, "../README.ko.md": 1}

Labels = Sequence[tuple[str, tuple[str, str], str]]
"""Rows of a table: key in the results, label in English and Korean, format of the value."""

_RESNET: Labels = (
    ("lowest Pearson r", ("lowest Pearson r over 10 images", "이미지 10장 중 가장 낮은 피어슨 r"), "{:.7f}"),
    ("same top-5", ("images with the same top-5", "상위 5개가 같은 이미지"), "{} / 10"),
    ("dispatches", ("launches", "커널 실행 수"), "{}"),
    ("compile IR to bytes, s", ("compile, IR to bytes, ms", "컴파일(IR에서 바이트까지), ms"), "{:.0f}"),
    ("first start, empty cache, s", ("first start, kernels compiled, ms", "첫 시작(커널 컴파일 포함), ms"), "{:.0f}"),
    ("start, warm cache, s", ("start, kernels cached, ms", "시작(커널 캐시 있음), ms"), "{:.0f}"),
    ("run one image, s", ("one image on the software GPU, ms", "소프트웨어 GPU에서 이미지 한 장, ms"), "{:.1f}"),
    (
        "PyTorch eager float32, s",
        ("PyTorch eager, float32, same cores, ms", "PyTorch eager, float32, 같은 코어, ms"),
        "{:.1f}",
    ),
    ("ratio to PyTorch eager", ("ratio", "비"), "{:.2f}"),
)
_LLM: Labels = (
    ("dispatches, prefill_128", ("launches, prefill of 128", "커널 실행 수, 128토큰 프리필"), "{}"),
    ("dispatches, decode", ("launches, decode step", "커널 실행 수, 디코드 한 단계"), "{}"),
    (
        "compile decode IR to bytes, s of one core",
        ("decode IR to bytes, s of one core", "디코드 IR에서 바이트까지, 코어 하나의 초"),
        "{:.2f}",
    ),
    ("lowest Pearson r", ("lowest r against PyTorch in bfloat16", "bfloat16 PyTorch와의 가장 낮은 피어슨 r"), "{:.5f}"),
    (
        "lowest Pearson r against float32",
        ("lowest r against PyTorch in float32", "float32 PyTorch와의 가장 낮은 피어슨 r"),
        "{:.5f}",
    ),
    (
        "lowest Pearson r of PyTorch against float32",
        ("the same of PyTorch in bfloat16", "bfloat16 PyTorch의 같은 값"),
        "{:.5f}",
    ),
    ("same argmax", ("same likeliest token, of 17 positions", "가장 그럴듯한 토큰이 같은 위치, 17곳 중"), "{}"),
    ("decided positions", ("decided positions", "결정된 위치"), "{}"),
    ("same argmax where decided", ("same likeliest token where decided", "결정된 위치 중 같은 곳"), "{}"),
    ("same top-5, as sets", ("same five likeliest tokens, of 17", "상위 다섯 토큰이 같은 위치, 17곳 중"), "{}"),
    (
        "same top-5 as float32",
        ("same five likeliest tokens as float32", "상위 다섯 토큰이 float32와 같은 위치"),
        "{}",
    ),
    (
        "same top-5 of PyTorch as float32",
        ("the same of PyTorch in bfloat16", "bfloat16 PyTorch의 같은 값"),
        "{}",
    ),
    ("decode, tokens/s", ("decode on the software GPU, tokens/s", "소프트웨어 GPU의 디코드, 초당 토큰"), "{:.2f}"),
    ("prefill, tokens/s", ("prefill on the software GPU, tokens/s", "소프트웨어 GPU의 프리필, 초당 토큰"), "{:.1f}"),
    (
        "peak memory, ratio to weights",
        ("peak memory of the process over the weights", "프로세스의 최대 메모리, 가중치에 대한 비"),
        "{:.3f}",
    ),
    (
        "weights on the device, ratio",
        ("weights on the device over the weight file", "장치의 가중치, 가중치 파일에 대한 비"),
        "{:.5f}",
    ),
)
_LEVELS: Labels = (
    ("resnet18, one image, s", ("ResNet-18, one image, ms", "ResNet-18, 이미지 한 장, ms"), "{:.1f}"),
    ("decoder, prefill of 128, s", ("decoder, prefill of 128, ms", "디코더, 128토큰 프리필, ms"), "{:.1f}"),
    ("decoder, one step, s", ("decoder, one step, ms", "디코더, 한 단계, ms"), "{:.1f}"),
)
_END = "<!-- end of figures -->"
_PICTURES = {"decode-time-en.svg": 0, "decode-time-ko.svg": 1}


def pages() -> dict[str, str]:
    """The text of each page with the tables that it marks, as the results give them, and the pictures."""
    resnets, steps, sweep = (_load(f"cuda_{name}_h200.json") for name in ("resnet", "llm", "sweep"))
    tables: dict[str, Callable[[int], Iterable[str]]] = {
        "resnet": _resnet,
        "compile_time": _compile_time,
        "cuda_resnet": lambda language: cuda_figures.resnet_table(resnets, language),
        "llm": _llm,
        "levels": _levels,
        "cuda_llm": lambda language: cuda_figures.llm_table(steps, language),
        "cuda_models": lambda language: cuda_figures.models_table(_load("cuda_models_h200.json"), language),
        "cuda_ops": lambda language: cuda_figures.ops_table(_load("cuda_ops_h200.json"), language),
        "cuda_summary": lambda language: cuda_figures.summary_table((resnets, steps), language),
        "cuda_calls": lambda language: cuda_figures.calls_table(_load("cuda_calls_h200.json"), language),
        "cuda_generation": lambda language: cuda_figures.generation_table(_load("cuda_generation_h200.json"), language),
        "cuda_sweep": lambda language: cuda_figures.sweep_text(sweep, language),
    }
    texts = {}
    for page, language in LANGUAGES.items():
        text = (FOLDER / page).read_text(encoding="utf-8")
        for name, table in tables.items():
            before, begin, rest = text.partition(f"<!-- figures: {name} -->")
            if begin:
                text = "\n".join((before + begin, "", *table(language), "", _END + rest.partition(_END)[2]))
        texts[page] = text
    return texts | {name: cuda_figures.decode_chart(sweep, language) for name, language in _PICTURES.items()}


def _load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return result


def _table(columns: Mapping[str, Mapping[str, Any]], rows: Labels, language: int) -> Iterable[str]:
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for key, labels, form in rows:
        label = labels[language]
        scale = 1000 if label.endswith(", ms") else 1
        cells = [form.format(column[key] * scale) if key in column else "" for column in columns.values()]
        yield f"| {label} | {' | '.join(cells)} |"


def _measured(results: Mapping[str, Any], columns: Mapping[str, Any], rows: Labels, language: int) -> Iterable[str]:
    """The machine, and a table of what was measured on it."""
    yield _machine(results["machine"])
    yield ""
    yield from _table(columns, rows, language)


def _resnet(language: int) -> Iterable[str]:
    results = _load("resnet_software_gpu.json")
    yield from _measured(results, results["models"], _RESNET, language)
    yield ""
    label = ("`import npu_compiler`: {:.2f} s.", "`import npu_compiler`: {:.2f}초.")[language]
    yield label.format(results["import npu_compiler, s"])


def _llm(language: int) -> Iterable[str]:
    results = _load("llm_software_gpu.json")
    names = {"one program": ("one program", "프로그램 하나"), "partitioned": ("partitioned", "분할")}
    yield from _measured(results, {label[language]: results[name] for name, label in names.items()}, _LLM, language)
    yield ""
    label = (
        "PyTorch eager in bfloat16 on the same cores: {:.2f} tokens/s.",
        "같은 코어의 PyTorch eager(bfloat16): 초당 {:.2f}토큰.",
    )
    yield label[language].format(results["PyTorch eager, tokens/s"])


def _compile_time(language: int) -> Iterable[str]:
    """Seconds by chain and target, with the ops of the chain as columns."""
    results = _load("compile_time.json")
    yield _machine(results["machine"])
    yield ""
    lengths = list(dict.fromkeys(n for row in results["chains"].values() for times in row.values() for n in times))
    head = ("chain of | target", "사슬 | 타깃")[language]
    ops = ("{:,} ops, s", "연산 {:,}개, s")[language]
    yield f"| {head} | {' | '.join(ops.format(int(length)) for length in lengths)} |"
    yield "|---" * (len(lengths) + 2) + "|"
    for name, row in results["chains"].items():
        for target, times in row.items():
            cells = (f"{times[length]:.2f}" if length in times else "" for length in lengths)
            yield f"| `{name}` | {target} | {' | '.join(cells)} |"


def _levels(language: int) -> Iterable[str]:
    results = _load("levels_software_gpu.json")
    yield from _measured(results, results["times"], _LEVELS, language)


def _machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in machine.items()) + "."


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
