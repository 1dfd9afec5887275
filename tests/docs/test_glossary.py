"""The glossary: alphabetical, each word once, the same in both languages, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["glossary.md", "glossary.ko.md"]
_ROW = re.compile(r"^\| (.*) \| (.*) \| `(.*)` \|$", re.MULTILINE)
_TYPE = re.compile(r"`([A-Z]\w+)`")


def rows(page: str) -> list[tuple[str, str, Path]]:
    """Word, meaning and file; in Korean a translation follows the word."""
    found = _ROW.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    return [(word.partition(" (")[0], meaning, ROOT / path) for word, meaning, path in found]


@pytest.mark.parametrize("page", PAGES)
def test_words_are_in_order_and_once(page: str) -> None:
    words = [word for word, _, _ in rows(page)]
    assert len(words) > 50
    assert words == sorted(set(words), key=str.lower)


def test_languages_have_the_same_words_and_files() -> None:
    english, korean = ([(word, path) for word, _, path in rows(page)] for page in PAGES)
    assert english == korean


@pytest.mark.parametrize(("word", "meaning", "path"), rows("glossary.md"), ids=lambda value: str(value)[:20])
def test_what_it_names_is_there(word: str, meaning: str, path: Path) -> None:
    assert path.exists()
    assert meaning.endswith(".")
    sources = [*(path.rglob("*.*") if path.is_dir() else [path]), *(ROOT / "npu_compiler").rglob("*.py")]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources if source.suffix != ".pyc")
    for name in _TYPE.findall(meaning):
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize("page", ["architecture.md", "architecture.ko.md"])
def test_the_architecture_leads_to_it(page: str) -> None:
    link = "(glossary.md)" if page == "architecture.md" else "(glossary.ko.md)"
    assert link in (ROOT / "docs" / page).read_text(encoding="utf-8")
