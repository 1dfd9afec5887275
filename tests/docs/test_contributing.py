"""Each how-to of CONTRIBUTING.md, done to a copy of the sources, passes its commands, and takes the files it says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_compiler.ops import get_supported_ops
from tests.docs.test_docs import EVERY_PAGE, ROOT
from tests.support.distribution import TOY_TARGET, write_metadata
from tests.support.pages import fences

PAGE = ROOT / "CONTRIBUTING.md"
FILES = {"an op": 2, "a reduction": 2, "a fusion": 3, "a kernel": 5, "a data type": 0, "a target": 0}
_SECTION = re.compile(r"^## How to add (.*?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"^(?:#|//) (\S+/\S+\.\w+)\n")
_PATH = re.compile(r"`([\w./]+/[\w./]*\w(?:\.\w+)?)`")
_COPIED = ("*_compiler", "*_runtime", "npu_*", "software_gpu", "tests", "examples", "docs", "pyproject.toml")


def sections() -> dict[str, list[tuple[str, str]]]:
    """The code fences of each how-to, each with its language."""
    return {name: _FENCE.findall(text) for name, text in _SECTION.findall(PAGE.read_text(encoding="utf-8"))}


def changed(fences: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """By file what a how-to adds to it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for language, text in fences:
        named = _FILE.match(text)
        if named is not None:
            found.setdefault(named[1], []).append((language, text[named.end() :]))
    return found


def add(path: Path, language: str, text: str) -> None:
    """Does to a file what a block says: a difference is applied, anything else stands at the end."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if language != "diff":
        path.write_text(f"{before}\n\n{text}" if before else text, encoding="utf-8")
        return
    for hunk in text.split("@@\n"):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
        old, new = ("".join(line for sign, line in lines if sign in (" ", kept)) for kept in "-+")
        assert before.count(old) == 1, f"{path.name}: the page's difference does not fit:\n{old}"
        before = before.replace(old, new)
    path.write_text(before, encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The sources with everything that the how-tos add."""
    place = tmp_path_factory.mktemp("sources")
    for path in {path for pattern in _COPIED for path in ROOT.glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, place / path.name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(path, place)
    for fences_ in sections().values():
        for name, blocks in changed(fences_).items():
            for language, text in blocks:
                add(place / name, language, text)
    yield place
    shutil.rmtree(place)


def run(copy: Path, *arguments: str) -> str:
    """Runs the interpreter on the copy, beside the toy target; gives what it prints. Cases compare with PyTorch."""
    pytest.importorskip("torch")
    site = copy / "site"
    if not site.exists():
        site.mkdir()
        write_metadata(TOY_TARGET, site)
    path = os.pathsep.join(map(str, (copy, TOY_TARGET, site)))
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:]
    return ran.stdout


def test_every_how_to_is_here() -> None:
    assert list(sections()) == list(FILES)


@pytest.mark.parametrize(("name", "count"), FILES.items())
def test_it_takes_as_many_files_as_it_says(name: str, count: int) -> None:
    files = changed(sections()[name])
    assert len(files) == count, list(files)
    words = {2: "Two files", 3: "Three files", 5: "Five files"}
    (text,) = (text for section, text in _SECTION.findall(PAGE.read_text(encoding="utf-8")) if section == name)
    assert words.get(count, "") in text


def test_the_ops_of_the_examples_are_not_here_yet() -> None:
    """Else an example would define one again: then it has to be another op."""
    added = [text for fences_ in sections().values() for _, text in fences_ if text.startswith("# npu_compiler/ops/")]
    named = {name for text in added for name in re.findall(r'"(aten\.\w+\.\w+)"', text)}
    assert named
    assert named.isdisjoint(get_supported_ops())


def test_the_commands_pass(copy: Path) -> None:
    """All in one run, of the folders that they name and the words that choose tests; each word chooses some."""
    lines = [line for f in sections().values() for kind, text in f if kind == "console" for line in text.splitlines()]
    places, words = [], []
    for line in lines:
        *command, place, option, word = shlex.split(line.removeprefix("$ "))
        assert (command, option) == (["python", "-m", "pytest"], "-k")
        places.append(place)
        words.append(word)
    assert len(words) == sum(count > 0 for count in FILES.values())
    quiet = ("-q", "-n", "0", "-p", "no:cacheprovider", "-rA", "--no-header")
    printed = run(copy, "-m", "pytest", *quiet, *dict.fromkeys(places), "-k", " or ".join(words))
    passed = re.findall(r"^PASSED (.*)$", printed, re.MULTILINE)
    assert [word for word in words if not any(word in test for test in passed)] == []


def test_the_examples_run(copy: Path) -> None:
    """All that are no part of a file, in one interpreter."""
    texts = [text for f in sections().values() for kind, text in f if kind == "python" and not _FILE.match(text)]
    assert texts
    run(copy, "-c", "\n".join(texts))


@pytest.mark.parametrize("page", [PAGE, PAGE.with_suffix(".ko.md")], ids=lambda path: path.name)
def test_every_path_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path for path in _PATH.findall(_FENCE.sub("", text)) if "X." not in path}
    assert len(named) > 10
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_it_is_a_page_of_the_documentation() -> None:
    assert PAGE in EVERY_PAGE
    assert fences(PAGE) == fences(PAGE.with_suffix(".ko.md"))
