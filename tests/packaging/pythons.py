"""Installs the project without extras in every Python that is found, and tries it there.

``python -m tests.packaging.pythons`` makes a virtual environment for each of Python 3.11, 3.12 and 3.13, installs the
project, and runs `npu doctor`, `compile`, `describe` and `run` outside of the repository, then the tests that need no
torch. Exits with 1 where one of them fails, or where none of the Pythons is there. It needs a package index, or a cache
of one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

VERSIONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).parents[2]
TESTS = ("architecture", "artifact", "compiler_core", "packaging", "runtime")

_TENSOR = {"shape": [4, 8], "dtype": "float32"}
_IR = {
    "model_name": "relu",
    "graph_inputs": [{"name": "x", **_TENSOR}],
    "graph_outputs": [{"name": "y", **_TENSOR}],
    "weights": [],
    "nodes": [
        {
            "name": "y",
            "op_type": "aten.relu.default",
            "inputs": [{"name": "x", **_TENSOR}],
            "attrs": {},
            "outputs": [{"name": "y", **_TENSOR}],
        }
    ],
}
_MAKE = "import numpy as np; np.save('x.npy', np.arange(-16, 16, dtype=np.float32).reshape(4, 8))"
_CHECK = "import numpy as np; assert (np.load('out/y.npy') == np.maximum(np.load('x.npy'), 0)).all()"


def main() -> int:
    found = {version: path for version in VERSIONS if (path := _interpreter(version))}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(len(VERSIONS)) as workers:
        wheel = _wheel(Path(place))
        worked = list(workers.map(lambda version: _tried(version, found[version], wheel), found))
    failed = [version for version, works in zip(found, worked, strict=True) if not works]
    absent = [version for version in VERSIONS if version not in found]
    print(f"worked: {sorted(found.keys() - failed)}, failed: {failed}, not found: {absent}")
    return 0 if found and not failed else 1


def _interpreter(version: str) -> str | None:
    """A Python of that version that makes environments, on the path or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
    return next((str(path) for path in candidates if path and _makes_environments(path)), None)


def _makes_environments(python: str | Path) -> bool:
    return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0


def _wheel(folder: Path) -> Path:
    """The project, built once for all."""
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _tried(version: str, python: str, wheel: Path) -> bool:
    started = perf_counter()
    with tempfile.TemporaryDirectory() as place:
        try:
            _try(python, Path(place), wheel)
        except subprocess.CalledProcessError as error:
            print(f"Python {version}: {' '.join(map(str, error.cmd))} exited with {error.returncode}")
            print(error.stdout, error.stderr, sep="\n")
            return False
    print(f"Python {version}: installed and tried in {perf_counter() - started:.0f} s", flush=True)
    return True


def _try(python: str, place: Path, wheel: Path) -> None:
    environment = place / "environment"
    _run([python, "-m", "venv", str(environment)], place)
    _link_compiler(environment)
    _run([environment / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, "pytest", "hypothesis"], place)
    (place / "relu.json").write_text(json.dumps(_IR))
    _run([environment / "bin" / "python", "-c", _MAKE], place)
    npu = environment / "bin" / "npu"
    run = "run relu.npubin -i x=x.npy -o out --device software-metal"
    for line in ("--version", "doctor", "compile relu.json", "describe relu.npubin", run):
        _run([npu, *line.split()], place)
    _run([environment / "bin" / "python", "-c", _CHECK], place)
    # The folders by what is left out: pytest would import the conftest of a folder that it is given.
    others = [f"--ignore={path}" for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in TESTS]
    plugin = ["-p", "tests.packaging.without_torch", "-p", "no:cacheprovider", "-q"]
    # Runs at the same time would clear away each other's old folders, and warn of what they do not find.
    folder = f"--basetemp={place / 'tests'}"
    tests: list[str | Path] = [environment / "bin" / "python", "-m", "pytest", folder, *plugin, *others, "tests"]
    print(_run(tests, ROOT).splitlines()[-1])


def _link_compiler(environment: Path) -> None:
    """Shares the compiler of the software GPU with this interpreter: it is most of what there is to download."""
    (site,) = environment.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).glob("ziglang*"):
        (site / path.name).symlink_to(path)


def _run(command: Sequence[str | Path], folder: Path) -> str:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
