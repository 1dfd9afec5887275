"""The documentation: complete in both languages, linked right, and its examples run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from npu_compiler import errors
from npu_compiler.partitioning.plan import PartitionPlan
from tests.support.pages import FENCE, fences, run_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENGLISH = sorted(path for path in DOCS.glob("*.md") if not path.name.endswith(".ko.md"))
PAGES = [*ENGLISH, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
EVERY_PAGE = [*PAGES, *(path.with_suffix(".ko.md") for path in PAGES)]
ELSEWHERE = {DOCS / "cluster.md"}  # tests/serving/test_ray.py runs it, on a cluster

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)


def without_fences(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def test_navigation_lists_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(page for entry in navigation["nav"] for page in entry.values()) == [path.name for path in ENGLISH]
    titles = {title for entry in navigation["nav"] for title in entry}
    korean = next(plugin["i18n"] for plugin in navigation["plugins"] if "i18n" in plugin)["languages"][1]
    assert set(korean["nav_translations"]) == titles


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_languages_agree(path: Path) -> None:
    korean = path.with_suffix(".ko.md")
    assert fences(korean) == fences(path)
    assert _HEADING.findall(without_fences(korean)) == _HEADING.findall(without_fences(path))


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as a repository's host makes them, and mkdocs by `docs/unicode_anchors.py`."""
    titles = re.findall(r"^#+ (.*)$", without_fences(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", EVERY_PAGE, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in _LINK.findall(without_fences(path)):
        if not link.startswith(("http:", "https:")):
            name, _, anchor = link.partition("#")
            page = path.parent / name if name else path
            assert page.is_file(), link
            assert not anchor or anchor in anchors(page), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_korean_pages_lead_to_korean_pages(path: Path) -> None:
    """A repository's host shows the files as they are; mkdocs takes either name."""
    links = [link.partition("#")[0] for link in _LINK.findall(without_fences(path.with_suffix(".ko.md")))]
    pages = [link for link in links if link.endswith(".md") and not link.startswith(("http:", "https:"))]
    assert [link for link in pages if not link.endswith(".ko.md") and link != "README.md"] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_korean_pages_are_of_one_style(path: Path) -> None:
    text = without_fences(path.with_suffix(".ko.md"))
    assert re.findall(r".{0,20}(?<![니시])다[.]", text) == []  # sentences are polite
    assert "행렬 곱" not in text


@pytest.mark.parametrize(
    "path", [page for page in PAGES[:-1] if fences(page) and page not in ELSEWHERE], ids=lambda path: path.name
)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a page's Python and its `npu` commands, in order, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    plan = run_page(path).get("plan")
    if isinstance(plan, PartitionPlan):
        assert not all(part.on_device for part in plan.partitions), "what it divides lowers whole"


@pytest.mark.parametrize("generator", ["generate_ops", "generate_figures", "generate_models"])
def test_generated_pages_are_current(generator: str) -> None:
    module = importlib.import_module(f"docs.{generator}")
    for name, text in module.pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"run: python -m docs.{generator}"


@pytest.mark.parametrize("page", ["errors.md", "errors.ko.md"])
def test_every_error_is_documented(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [name for name in errors.__all__ if f"| `{name}` |" not in text] == []
