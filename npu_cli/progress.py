"""What takes long says so, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["PREPARING", "waiting"]

PREPARING = "preparing the kernels; the first time on a machine takes longest"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows `what` and the time that it takes on standard error, until the block ends; on a terminal only."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield
