"""Tables and the picture of the CUDA benchmarks, from `benchmarks/results/cuda_*.json`; texts are (English, Korean)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from docs.line_chart import Line, line_chart

__all__ = ["calls_table", "decode_chart", "generation_table", "llm_table", "models_table", "ops_table", "resnet_table"]
__all__ += ["summary_table", "sweep_text"]

Row = Mapping[str, Any]
Texts = tuple[str, str]
Column = tuple[Texts, Callable[[Row], str]]

_PEERS: Mapping[str, Texts] = {
    "eager": ("PyTorch eager", "PyTorch eager"),
    "captured": ("PyTorch eager, captured", "PyTorch eager, 캡처"),
    "compiled": ("torch.compile, captured", "torch.compile, 캡처"),
    "autotuned": ("max-autotune, captured", "max-autotune, 캡처"),
}
_CEILINGS: Mapping[str, Texts] = {
    "bus to the device, GB/s": ("the bus to the device at {} GB/s", "장치로 가는 버스 {} GB/s"),
    "copy, GB/s": ("copy {} GB/s (read and written)", "복사 {} GB/s(읽기와 쓰기)"),
    "matrix-vector product, GB/s": ("matrix-vector product {} GB/s", "행렬-벡터 곱 {} GB/s"),
    "matmul, TFLOP/s": ("matrix product {} TFLOP/s", "행렬곱 {} TFLOP/s"),
}
_GENERATION: Sequence[tuple[tuple[str, str], float, str, Texts]] = (
    (("generation", "greedy: ahead, ms a token"), 1, "{:.3f} ms", ("wall clock per token", "토큰당 벽시계 시간")),
    (
        ("generation", "decode step on the device, ms"),
        1,
        "{:.3f} ms",
        ("decode step on the device", "장치의 디코드 단계"),
    ),
    (("generation", "greedy: ratio"), 1, "{:.4f}", ("the former over the latter", "앞의 것과 뒤의 것의 비")),
    (
        ("generation", "temperature 0.8, top-p 0.95: ahead, ms a token"),
        1,
        "{:.3f} ms",
        ("wall clock per token at temperature 0.8, top-p 0.95", "온도 0.8, top-p 0.95에서 토큰당 벽시계 시간"),
    ),
    (
        ("generation", "temperature 0.8, top-p 0.95: ratio"),
        1,
        "{:.4f}",
        ("that over the decode step", "그것과 디코드 단계의 비"),
    ),
    *(
        (
            ("generation", f"{kind}: one by one, us beyond the step"),
            1,
            "{:.0f} us",
            (
                f"steps asked for one by one, beyond the step: {english}",
                f"한 단계씩 요청할 때 디코드 단계에 더해지는 시간: {korean}",
            ),
        )
        for kind, english, korean in (
            ("greedy", "greedy", "그리디"),
            ("temperature 0.8", "temperature 0.8", "온도 0.8"),
            ("temperature 0.8, top-p 0.95", "with top-p 0.95", "top-p 0.95까지"),
            (
                "temperature 0.7, top-k 20, top-p 0.8",
                "temperature 0.7, top-k 20, top-p 0.8",
                "온도 0.7, top-k 20, top-p 0.8",
            ),
            (
                "temperature 1.0, top-k 100, top-p 0.9",
                "temperature 1, top-k 100, top-p 0.9",
                "온도 1, top-k 100, top-p 0.9",
            ),
        )
    ),
    *(
        (
            ("generation", f"temperature 0.8, top-p 0.95: choice from logits on the {place}, us"),
            1,
            "{:.0f} us",
            (
                f"a choice by itself, as where the CPU does a part of a step: with top-p 0.95, logits on the {place}",
                f"CPU가 단계의 일부를 할 때처럼 따로 요청한 top-p 0.95의 토큰 고르기: {korean}에 있는 로짓",
            ),
        )
        for place, korean in (("device", "장치"), ("host", "호스트"))
    ),
    (("first result, s", "first token"), 1, "{:.2f} s", ("start to first token", "시작에서 첫 토큰까지")),
    (
        ("first result, s", "imports"),
        1,
        "{:.2f} s",
        ("of these, interpreter and imports", "그중 인터프리터와 임포트까지"),
    ),
    (("first result, s", "device"), 1, "{:.2f} s", ("... and the device opened", "... 장치를 열 때까지")),
    (
        ("first result, s", "program and weights"),
        1,
        "{:.2f} s",
        ("... and program and weights loaded", "... 프로그램과 가중치를 읽을 때까지"),
    ),
    (("memory", "weights"), 2**-20, "{:,.0f} MiB", ("weights on the device", "장치의 가중치")),
    (("memory", "caches"), 2**-20, "{:,.0f} MiB", ("caches", "캐시")),
    (("memory", "peak of activations"), 2**-20, "{:,.0f} MiB", ("peak of activations", "활성값의 최댓값")),
    (("memory", "used"), 2**-20, "{:,.0f} MiB", ("device memory taken", "차지한 장치 메모리")),
    (
        ("memory", "beyond, share"),
        1,
        "{:.1%}",
        ("beyond weights, caches and activations", "가중치, 캐시, 활성값을 넘는 몫"),
    ),
)
"""Where a figure lies, what it is multiplied by, its format, its label."""

_X_TICKS = (0, 4096, 8192, 12288, 16384, 20480, 24576, 28672, 32768)
_Y_TICKS = (0.5, 1, 2, 5, 10, 20)


def _peer(name: str) -> Column:
    def cell(row: Row) -> str:
        if row.get(name) is not None:
            return f"{row[name]:.3f}"
        limit = row.get(f"{name}, not compiled within, s")
        return "-" if limit is None else f"> {limit:.0f} s"

    return _PEERS[name], cell


def _number(texts: Texts, key: str, form: str) -> Column:
    return texts, lambda row: form.format(row[key]) if key in row else "-"


def _step(row: Row) -> str:
    return str(row["workload"]).replace("_", " ")


def _argmax(row: Row) -> str:
    if row["same argmax"]:
        return "✓"
    tied = row.get("gap of the best two", 1.0) < 2 * row.get("captured, largest error", 0.0)
    return "=" if tied else "✗"


_RATIO = _number(("ratio to the best of them", "그중 가장 빠른 것과의 비"), "ratio to the best peer", "{:.2f}")
_OWN: Column = (("this project", "이 프로젝트"), lambda row: f"**{row['npu']:.3f}**")
_MATMUL = _number(("of the matrix product", "행렬곱 대비"), "share of the matmul ceiling", "{:.0%}")
_MEMORY = _number(("of the memory bandwidth", "메모리 대역폭 대비"), "share of the memory bandwidth", "{:.0%}")

_SUBJECT: Column = (
    ("model, batch; or step and position", "모델과 배치, 또는 단계와 위치"),
    lambda row: f"{row['model']}, {row['batch']}" if "model" in row else f"{_step(row)}, {row['position']}",
)
_RESNET: Sequence[Column] = (
    (("model, batch", "모델, 배치"), lambda row: f"{row['model']}, {row['batch']}"),
    _OWN,
    *map(_peer, ("eager", "captured", "compiled", "autotuned")),
    _RATIO,
    _MATMUL,
    _MEMORY,
    _number(("lowest r", "가장 낮은 r"), "lowest Pearson r", "{:.6f}"),
    _number(("of PyTorch", "PyTorch의 r"), "captured, lowest Pearson r", "{:.6f}"),
    _number(("same top-5", "같은 상위 5개"), "same top-5", "{:.1%}"),
    _number(("of PyTorch", "PyTorch의 상위 5개"), "captured, same top-5", "{:.1%}"),
)
_MODELS: Sequence[Column] = (
    *_RESNET[:2],
    *map(_peer, ("eager", "captured", "compiled")),
    _RATIO,
    _number(("launches", "커널 실행 수"), "launches", "{}"),
    _number(("r", "r"), "Pearson r", "{:.6f}"),
    _number(("of PyTorch", "PyTorch의 r"), "captured, Pearson r", "{:.6f}"),
)
_OPS: Sequence[Column] = (
    (("op, float16", "연산, float16"), lambda row: str(row["op"])),
    (("this project", "이 프로젝트"), lambda row: f"**{row['npu']:.4f}**"),
    *((texts, lambda row, peer=peer: f"{row[peer]:.4f}") for peer, texts in list(_PEERS.items())[:2]),
    (("ratio to eager", "eager와의 비"), lambda row: f"{row['npu'] / row['eager']:.2f}"),
    (("to captured", "캡처와의 비"), lambda row: f"{row['npu'] / row['captured']:.2f}"),
)
_LLM: Sequence[Column] = (
    (("step", "단계"), _step),
    (("position", "위치"), lambda row: str(row["position"])),
    _OWN,
    *map(_peer, ("eager", "captured", "compiled")),
    _RATIO,
    _MEMORY,
    _MATMUL,
    _number(("r", "r"), "Pearson r", "{:.5f}"),
    _number(("of PyTorch", "PyTorch의 r"), "captured, Pearson r", "{:.5f}"),
    (("same argmax", "같은 argmax"), _argmax),
    _number(("of top-5", "상위 5개 중"), "of top-5", "{}"),
    _number(("of PyTorch", "PyTorch의 상위 5개"), "captured, of top-5", "{}"),
)


def resnet_table(results: Mapping[str, Any], language: int) -> Iterable[str]:
    """The ResNets of a file of results."""
    yield from _table(results, _RESNET, language)


def models_table(results: Mapping[str, Any], language: int) -> Iterable[str]:
    """The encoders of a file of results."""
    yield from _table(results, _MODELS, language)


def ops_table(results: Mapping[str, Any], language: int) -> Iterable[str]:
    """The ops of a file of results, in its order."""
    rows = [row for run in results["runs"] for row in run["results"] if "npu" in row]
    machines = dict.fromkeys(
        ", ".join(f"{key}: {value}" for key, value in run["machine"].items()) for run in results["runs"]
    )
    yield f"{'; '.join(machines)}."
    yield ""
    yield f"| {' | '.join(texts[language] for texts, _ in _OPS)} |"
    yield "|---" * len(_OPS) + "|"
    for row in rows:
        yield f"| {' | '.join(cell(row) for _, cell in _OPS)} |"


def llm_table(results: Mapping[str, Any], language: int) -> Iterable[str]:
    """The steps of a language model of a file of results."""
    yield from _table(results, _LLM, language)


def summary_table(files: Sequence[Mapping[str, Any]], language: int) -> Iterable[str]:
    """The rows of some files of results that stand beside PyTorch, with the times alone."""
    peers = ("compiled", "captured")
    columns = (_SUBJECT, _OWN, *map(_peer, peers), _RATIO)
    yield f"| {' | '.join(texts[language] for texts, _ in columns)} |"
    yield "|---" * len(columns) + "|"
    for row in (row for results in files for row in _rows(results) if not row.keys().isdisjoint(peers)):
        yield f"| {' | '.join(cell(row) for _, cell in columns)} |"


def _table(results: Mapping[str, Any], columns: Sequence[Column], language: int) -> Iterable[str]:
    rows = _rows(results)
    shown = [(texts, cell) for texts, cell in columns if any(cell(row) != "-" for row in rows)]
    yield from _machines(results["runs"], language)
    yield ""
    yield f"| {' | '.join(texts[language] for texts, _ in shown)} |"
    yield "|---" * len(shown) + "|"
    for row in rows:
        yield f"| {' | '.join(cell(row) for _, cell in shown)} |"
    yield ""
    spread = [(row["npu, greatest"] - row["npu, least"]) / row["npu"] for row in rows if "npu, least" in row]
    if spread:
        text = (
            "Three medians of this project's time, taken one after another, differ by {:.1%} at most.",
            "이 프로젝트의 시간을 이어서 세 번 잰 중앙값들은 최대 {:.1%} 차이 납니다.",
        )
        yield text[language].format(max(spread))


def _rows(results: Mapping[str, Any]) -> list[Row]:
    """The rows of all runs, by model or kind of step, size and position."""

    def place(row: Row) -> tuple[str, int, int]:
        kind, _, size = row["workload"].partition("_") if "workload" in row else (row["model"], "", row["batch"])
        return kind, int(size), row.get("position", 0)

    return sorted((row for run in results["runs"] for row in run["results"]), key=place)


def _machines(runs: Sequence[Mapping[str, Any]], language: int) -> Iterable[str]:
    """Each machine once, and the ceilings of all runs, as a range where they differ."""
    machines = dict.fromkeys(", ".join(f"{key}: {value}" for key, value in run["machine"].items()) for run in runs)
    ceilings = []
    for key, texts in _CEILINGS.items():
        values = [f"{run['ceilings'][key]:,.0f}" for run in runs if key in run["ceilings"]]
        if values:
            ends = sorted(set(values), key=lambda text: float(text.replace(",", "")))
            ceilings.append(texts[language].format("–".join(dict.fromkeys((ends[0], ends[-1])))))
    label = ("Ceilings measured beside it: {}.", "함께 잰 한계: {}.")[language]
    yield f"{'; '.join(machines)}. {label.format(', '.join(ceilings))}{_tuned(runs, language)}"


def _tuned(runs: Sequence[Mapping[str, Any]], language: int) -> str:
    """A sentence that says of which rows this project's programs were tuned; nothing where none were."""
    if all(run.get("tuned") for run in runs):
        return (" This project's programs were tuned.", " 이 프로젝트의 프로그램은 튜닝했습니다.")[language]
    rows = _rows({"runs": [run for run in runs if run.get("tuned")]})
    names = (_SUBJECT[1](row) if "model" in row else _step(row) for row in rows)
    text = (" This project's programs were tuned for {}.", " 이 프로젝트의 프로그램은 {}에서 튜닝했습니다.")[language]
    return text.format(", ".join(dict.fromkeys(names))) if rows else ""


def calls_table(results: Mapping[str, Any], language: int) -> Iterable[str]:
    """What a caller waits for, median and 99th percentile in milliseconds, of a file of results."""
    yield from _machines(results["runs"], language)
    yield ""
    heads = (
        ("model, batch", "모델과 배치"),
        ("one after another", "이어서 호출"),
        ("waiting for each", "매번 기다림"),
        ("array to array", "배열에서 배열로"),
    )
    torch = ("torch.compile", "torch.compile")[language]
    columns = [heads[0][language]]
    for head in heads[1:]:
        columns += [head[language], torch, ("ratio", "비")[language]]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in _rows(results):
        cells = [f"{row['model']}, {row['batch']}"]
        for way in ("", " waiting", " arrays"):
            own, other = (f"{row[name]:.3f} ({row[f'{name}, p99']:.3f})" for name in (f"npu{way}", f"torch{way}"))
            cells += [f"**{own}**", other, f"{row[f'npu{way}'] / row[f'torch{way}']:.2f}"]
        yield f"| {' | '.join(cells)} |"


def generation_table(results: Mapping[str, Any], language: int) -> Iterable[str]:
    """What generating a text takes, of a file of results."""
    yield ", ".join(f"{key}: {value}" for key, value in results["machine"].items()) + "."
    yield ""
    yield "| | |"
    yield "|---|---|"
    for (part, key), scale, form, label in _GENERATION:
        yield f"| {label[language]} | {form.format(results[part][key] * scale)} |"


def sweep_text(results: Mapping[str, Any], language: int) -> Iterable[str]:
    """The slowest position of each length of the cache."""
    yield from _machines(results["runs"], language)
    yield ""
    text = (
        "Cache of {}: {:.3f} ms at the slowest of {} positions, {}, and {:.3f} ms at the fastest.",
        "캐시 {0}: 위치 {2}곳 중 가장 느린 {3}에서 {1:.3f}ms, 가장 빠른 곳에서 {4:.3f}ms.",
    )
    for workload, rows in groupby(_rows(results), key=lambda row: row["workload"]):
        of_cache = sorted(rows, key=lambda row: row["npu"])
        slowest, fastest = of_cache[-1], of_cache[0]
        cache = workload.removeprefix("decode_")
        yield "- " + text[language].format(cache, slowest["npu"], len(of_cache), slowest["position"], fastest["npu"])


def decode_chart(results: Mapping[str, Any], language: int) -> str:
    """Milliseconds of a decode step over its position in the cache, as SVG."""
    rows = _rows(results)
    long, short = ([row for row in rows if row["workload"] == f"decode_{cache}"] for cache in (32768, 2048))
    own = ("this project, cache {:,}", "이 프로젝트, 캐시 {:,}")[language]
    floor = [(row["position"], row["npu"] * row["share of the memory bandwidth"]) for row in long]
    lines = [
        *(_peer_line(long, peer, color, language) for peer, color in (("captured", "#999"), ("compiled", "#d95f02"))),
        Line(("bytes / memory bandwidth", "바이트 / 메모리 대역폭")[language], floor, "#222", dashed=True),
        Line(own.format(32768), [(row["position"], row["npu"]) for row in long], "#1b6ca8"),
        Line(own.format(2048), [(row["position"], row["npu"]) for row in short], "#1b9e77"),
    ]
    labels = ("position in the cache, tokens", "캐시 안의 위치, 토큰"), ("a decode step, ms", "디코드 한 단계, ms")
    drawn = [line for line in lines if line.points]
    return line_chart(drawn, _X_TICKS, _Y_TICKS, labels[0][language], labels[1][language])


def _peer_line(rows: Sequence[Row], peer: str, color: str, language: int) -> Line:
    points = [(row["position"], row[peer]) for row in rows if row.get(peer) is not None]
    return Line(_PEERS[peer][language], points, color)
