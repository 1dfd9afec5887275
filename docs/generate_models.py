"""Writes the pages of models from what `benchmarks.coverage` recorded: ``python -m docs.generate_models``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.coverage.records import read_records
from benchmarks.coverage.sums import Sums, is_wrong, missing, sums, tried

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "benchmarks" / "results" / "coverage.json"

_EXAMPLES = 3
_HEADS = {
    "models.md": """# Models

How far models come that nobody tuned anything for: {count} of torchvision, timm and transformers, built by name, small,
with seeded weights. Each is extracted, divided, compiled and run, and its outputs are compared with PyTorch in float32.
This page is generated from the records of that run (`benchmarks/results/coverage.json`), which
`python -m benchmarks.coverage` makes.

{run}

Constants that constructors leave (scales of one, branches times zero) get noise, and BatchNorms the statistics of
random inputs, so that no part of a model is without effect. r is Pearson's correlation, the smallest over a model's
outputs; an output is wrong where r is below 0.99 and neither float16 alone, in PyTorch, nor PyTorch's own export of the
model explains it. What stays on the CPU has its reason below, and its price in the [ledger](mixed.md#the-ledger) of the
model's own plan. A model that is refused decides by the values of tensors what it computes, or returns what is no
tensor.
""",
    "models.ko.md": """# 모델

따로 맞춘 적이 없는 모델이 어디까지 가는지 보여 줍니다. torchvision, timm, transformers의 모델
{count}개를 이름으로, 작은 크기와 정해진 시드의 가중치로 만들었습니다. 모델마다 추출, 분할, 컴파일, 실행을
거쳐 출력을 PyTorch float32와 비교합니다. 이 문서는 그 실행의 기록(`benchmarks/results/coverage.json`)에서
생성되며, 기록은 `python -m benchmarks.coverage`가 만듭니다.

{run}

생성자가 남기는 상수(1인 스케일, 0을 곱한 가지)에는 잡음을 더하고 BatchNorm에는 무작위 입력의 통계를 넣어,
모델의 어느 부분도 결과에 영향이 없는 일이 없게 했습니다. r은 피어슨 상관계수로, 모델의 출력 가운데 가장 작은
값입니다. r이 0.99보다 낮고 PyTorch의 float16 계산으로도, PyTorch가 내보낸 모델로도 설명되지 않으면 틀린 출력으로
셉니다. CPU에 남은 연산의 이유는 아래에, 그 비용은 모델 자신의 계획에 있는 [원장](mixed.ko.md#원장)에 있습니다.
거절된 모델은 무엇을 계산할지를 텐서의 값에 따라 정하거나 텐서가 아닌 것을 돌려줍니다.
""",
}
_WORDS: Mapping[str, Mapping[str, Any]] = {
    "models.md": {
        "run": "Device: {device}. {libraries}.",
        "partition": "Device: none; models were divided for {device} and not run. {libraries}.",
        "sums": (
            "## Sums",
            ("models of", "built", "refused", "errors", "wholly on the device", "nodes on the device", "ran", "wrong"),
        ),
        "all": "all",
        "left": ("## What is left on the CPU", ("op", "reason", "models", "nodes", "for example")),
        "errors": ("## Refused, and errors", ("model", "after", "error")),
        "models": ("## All models", ("model", "kind", "nodes on the device", "partitions", "launches", "r", "left")),
        "none": "Nothing.",
    },
    "models.ko.md": {
        "run": "장치: {device}. {libraries}.",
        "partition": "장치: 없음. {device}용으로 분할만 하고 실행하지 않았습니다. {libraries}.",
        "sums": (
            "## 합계",
            ("출처", "만든 모델", "거절", "오류", "모두 장치에서", "장치에서 도는 노드", "실행", "틀림"),
        ),
        "all": "전체",
        "left": ("## CPU에 남은 것", ("연산", "이유", "모델", "노드", "예")),
        "errors": ("## 거절과 오류", ("모델", "마지막 단계", "오류")),
        "models": ("## 모든 모델", ("모델", "종류", "장치에서 도는 노드", "파티션", "실행 호출", "r", "남은 연산")),
        "none": "없습니다.",
    },
}


def pages() -> dict[str, str]:
    """The text of each page, by file name."""
    run, records = read_records(RESULTS)
    chosen = [records[name] for name in sorted(records)]
    return {name: "\n".join(_page(name, run, chosen)) + "\n" for name in _HEADS}


def _page(name: str, run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    words = _WORDS[name]
    found = tried(records)
    libraries = ", ".join(f"{library} {version}" for library, version in run["libraries"].items())
    described = words["run" if run["until"] == "run" else "partition"].format(device=run["device"], libraries=libraries)
    yield _HEADS[name].format(count=len(found), run=described).rstrip()
    yield from _table(words["sums"], _sum_rows(found, words["all"]))
    left = [
        (f"`{each.op}`", _escaped(each.reason), len(each.models), each.nodes, ", ".join(each.models[:_EXAMPLES]))
        for each in missing(found)
    ]
    yield from _table(words["left"], left, words["none"])
    failed = [record for record in found if isinstance(record.get("error"), Mapping)]
    rows = [
        (record["name"], record["status"], _escaped(f"{record['error']['type']}: {record['error']['message']}"))
        for record in failed
    ]
    yield from _table(words["errors"], rows, words["none"])
    yield from _table(words["models"], [_model_row(record) for record in found])


def _sum_rows(records: Sequence[Mapping[str, Any]], everything: str) -> Iterator[tuple[Any, ...]]:
    sources = dict.fromkeys(record["name"].partition("/")[0] for record in records)
    for source in sources:
        yield _sum_row(source, sums([record for record in records if record["name"].startswith(f"{source}/")]))
    yield _sum_row(f"**{everything}**", sums(records))


def _sum_row(title: str, found: Sums) -> tuple[Any, ...]:
    whole = f"{found.whole} ({_percent(found.whole, found.models)})"
    nodes = f"{found.nodes_on_device:,} / {found.nodes:,} ({_percent(found.nodes_on_device, found.nodes)})"
    return title, found.models, found.refused, found.errors, whole, nodes, found.ran, found.wrong


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _model_row(record: Mapping[str, Any]) -> tuple[Any, ...]:
    if "nodes_on_device" not in record:
        return record["name"], record.get("kind", "-"), "-", "-", "-", "-", "-"
    r = "-"
    if "r" in record:
        r = f"**{record['r']:.4f}**" if is_wrong(record) else f"{record['r']:.4f}"
    left = ", ".join(f"`{op}`" for op in dict.fromkeys(each["op"] for each in record["left"]))
    nodes = f"{record['nodes_on_device']} / {record['nodes']}"
    return record["name"], record["kind"], nodes, record["partitions"], record.get("launches", "-"), r, left or "-"


def _table(titles: tuple[str, Sequence[str]], rows: Any, none: str = "") -> Iterator[str]:
    title, columns = titles
    cells = [" | ".join(map(str, row)) for row in rows]
    yield f"\n{title}\n"
    if not cells and none:
        yield none
        return
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in cells:
        yield f"| {row} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
