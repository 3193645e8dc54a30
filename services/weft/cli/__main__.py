"""Entry point of ``weft`` and ``python -m weft.cli``.

A command's module is imported when the command runs, so that ``weft --help`` loads neither gRPC nor numpy.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import argcomplete

from weft import __version__
from weft.base.errors import UnsupportedError, WeftError
from weft.base.text.printable import printable
from weft.cli.arguments import calls, capacity, files, jobs, mesh, models
from weft.cli.arguments.parser import CommandParser

#: Of commands whose modules import a package that the base has not: what installs it.
_EXTRAS = {"batch": "jobs", "optimize": "optimize"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 done, 1 failed, 2 wrong usage."""
    parser = make_parser()
    argcomplete.autocomplete(parser)  # does nothing unless a shell asks
    options = parser.parse_args(argv)
    try:
        status: int = _module(options).run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except WeftError as error:
        print(printable(f"weft: {error.code}: {error.message}"), file=sys.stderr)
        return 1
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader has left, as in `weft check | head`
            print(f"weft {options.command}: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        return 1
    return status


def make_parser() -> CommandParser:
    """The parser of all commands."""
    parser = CommandParser(prog="weft", description="Serve models as a mesh of gRPC services.")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in (mesh, calls, files, jobs, models, capacity):
        known = set(commands.choices)
        group.add_commands(commands)
        for name in commands.choices.keys() - known:
            folder = group.__name__.rpartition(".")[2]
            commands.choices[name].set_defaults(module=f"{folder}.{name.replace('-', '_')}")
    return parser


def _module(options: argparse.Namespace) -> Any:
    """The module of the command. Raises UnsupportedError where a package that it needs is not installed."""
    try:
        return import_module(f"weft.cli.commands.{options.module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("weft"):
            raise
        extra = _EXTRAS.get(options.command, "mesh")
        raise UnsupportedError(
            f"weft {options.command} needs '{error.name}': pip install 'weft-mesh[{extra}]'"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
