"""Writes the pages of supported ops from the op registry: ``python -m docs.generate_ops``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from npu_compiler.ops import OpDefinition, definition, get_supported_ops

FOLDER = Path(__file__).parent

_HEADS = {
    "ops.md": """# Supported ops

Every ATen op that has a definition, by family; this page is generated from the registry. In-place variants are the
same op. Whether a node lowers also depends on its attributes: `npu_compiler.is_op_supported(node)` asks the real
lowering and gives the reason where it does not.
""",
    "ops.ko.md": """# 지원 연산

정의가 있는 모든 ATen 연산을 계열별로 적었습니다. 이 문서는 연산 레지스트리에서 생성됩니다. 제자리(in-place) 변형은 같은
연산으로 다룹니다. 어떤 노드를 실제로 컴파일할 수 있는지는 속성에도 달려 있습니다.
`npu_compiler.is_op_supported(node)`는 실제 로어링을 수행해 답하고, 안 되면 그 이유를 알려 줍니다.
""",
}
_COLUMNS = {"ops.md": ("op", "parameters", "meaning"), "ops.ko.md": ("연산", "매개변수", "의미")}


def pages() -> dict[str, str]:
    """The text of each page, by file name."""
    entries = {entry.names[0]: entry for entry in map(definition, get_supported_ops()) if entry is not None}
    ordered = sorted(entries.values(), key=lambda entry: (entry.family, entry.names[0]))
    return {name: "\n".join(_page(name, ordered)) + "\n" for name in _HEADS}


def _page(name: str, entries: Iterable[OpDefinition]) -> Iterable[str]:
    yield _HEADS[name].rstrip()
    for family, members in groupby(entries, key=lambda entry: entry.family):
        yield f"\n## {family}\n"
        yield f"| {' | '.join(_COLUMNS[name])} |"
        yield "|---|---|---|"
        for entry in members:
            names = "<br>".join(f"`{op.removeprefix('aten.')}`" for op in entry.names)
            own = (parameter.name for parameter in entry.parameters)
            parameters = ", ".join(f"`{name}`" for name in own if not name.startswith("_"))  # else the compiler's
            yield f"| {names} | {parameters} | {_escaped(entry.summary)} |"


def _escaped(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
