"""Reads the command line and runs one sub-command."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

#: Each is a module here with `add_arguments(parser)` and `run(arguments)`, imported only when it is asked for.
_COMMANDS = {
    "env": "print what a bug report needs: versions, devices, launch environment, strategy",
    "checkpoint": "inspect, verify, export and compare checkpoints",
}


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The words after "acclight". Default: this process's.

    Returns:
        The exit status: 0, that of the command, or 2 for an error, which has been told in one line on standard error.

    Raises:
        SystemExit: For --help and --version, and with status 2 for words that cannot be read.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="acclight", description="Trains PyTorch models on Hugging Face Accelerate.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        if words[:1] == [name]:
            import_module(f"acclight.cli.{name}").add_arguments(command)
    if not words:
        parser.error(f"give a command: {', '.join(_COMMANDS)}; `acclight --help` says what they do")
    if not words[0].startswith("-") and words[0] not in _COMMANDS:
        near = difflib.get_close_matches(words[0], _COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(_COMMANDS)}"
        parser.error(f"unknown command {words[0]!r}; {hint}")
    arguments = parser.parse_args(words)
    try:
        return import_module(f"acclight.cli.{arguments.command}").run(arguments) or 0
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"acclight {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _version() -> str:
    import acclight

    return f"acclight {acclight.__version__}"
