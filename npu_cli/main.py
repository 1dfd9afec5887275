"""Entry point of the console command `npu`."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from threading import current_thread, main_thread
from typing import Any, TextIO, cast

__all__ = ["main"]

_USAGE = 2  # as argparse has it
_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when all went well, 1 after an error, 130 after an interrupt. A wrong command line exits with 2.
    """
    output: TextIO | None = sys.stdout  # None where it is closed
    errors: TextIO | None = sys.stderr
    try:
        if errors is None:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # takes the number 2, which is then no other file's
        if output is None:
            _print_error("standard output is closed; redirect it to a file or to /dev/null")
            return 1
        _take_any_character(output)
        try:
            with redirect_stdout(cast(TextIO, _Output(output))):
                return _run(arguments)
        except _OutputError as error:
            return _after_failed_write(output, error.reason)
    except KeyboardInterrupt:  # at any time, imports included
        return _INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    from npu_cli.parser import build_parser  # here, where an interrupt is noticed

    try:
        parser = build_parser()
        parsed = parser.parse_args(arguments)
    except SystemExit:
        sys.stdout.flush()  # the text of --help
        raise
    if parsed.command is None:
        parser.print_help(sys.stderr)
        parser.exit(_USAGE)
    # A command's module, and all that it imports, is loaded only when it runs.
    with _interrupts_held():
        command = import_module(f"npu_cli.commands.{parsed.command.replace('-', '_')}")
        from npu_compiler.errors import NPUError

    try:
        status: int = command.execute(parsed)
        sys.stdout.flush()
    except NPUError as error:
        if parsed.debug:
            raise
        _print_error(str(error))
        return 1
    return status


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Lets Ctrl-C wait for the end of the block.

    It is for imports of moments: in the middle of one, C code takes an interrupt for a package that is damaged.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


class _OutputError(Exception):
    """Standard output takes no more; unlike an OSError it cannot be mistaken for a failure of anything else."""

    def __init__(self, reason: OSError) -> None:
        self.reason = reason


class _Output:
    """Standard output, whose failures are `_OutputError`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _OutputError(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _OutputError(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _take_any_character(stream: TextIO) -> None:
    """Lets a stream whose encoding lacks a character show the character's number instead of failing."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _after_failed_write(output: TextIO, reason: OSError) -> int:
    """The exit status. What is left in the stream's buffer goes nowhere, lest the interpreter try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    if isinstance(reason, BrokenPipeError):  # the reader, such as `head`, has enough
        return 0
    _print_error(f"cannot write to standard output: {reason.strerror}")
    return 1


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), (message, "red"))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
