"""Entry point of the console command `npu`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from npu_cli.parser import build_parser

__all__ = ["main"]

_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when all went well, 1 after an error, 130 after an interrupt. A wrong command line exits with 2.
    """
    try:
        if sys.stderr is None:
            sys.stderr = open(os.devnull, "w")  # its number is then no other file's  # noqa: SIM115
        if sys.stdout is None:
            print("error: standard output is closed; redirect it to a file or to /dev/null", file=sys.stderr)
            return 1
        _take_any_character(sys.stdout)
        try:
            return _run(arguments)
        except OSError as error:
            return _after_failed_write(error)
    except KeyboardInterrupt:  # at any time, imports included
        return _INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    try:
        parsed = build_parser().parse_args(arguments)
    except SystemExit:
        sys.stdout.flush()  # the text of --help
        raise
    # A command's module, and all that it imports, is loaded only when it runs.
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


def _take_any_character(stream: object) -> None:
    """Lets a stream whose encoding lacks a character show the character's number instead of failing."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _after_failed_write(error: OSError) -> int:
    """The exit status after standard output failed; any other failure is raised again.

    What could not be written stays in the stream's buffer, so that a flush fails once more; it is then thrown away,
    since the interpreter would try again, and complain, when it ends.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has enough
            return 0
        _print_error(f"cannot write to standard output: {error.strerror}")
        return 1
    raise error


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), (message, "red"))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
