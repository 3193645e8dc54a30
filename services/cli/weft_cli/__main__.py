"""Entry point of ``weft`` and ``python -m weft_cli``.

A command's module is imported when the command runs, so that ``weft --help`` loads neither gRPC nor numpy.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from weft_cli import arguments

#: Commands whose module is not ``weft_cli.<command>``.
_TOOLS = ("check", "convert", "draw", "explain", "lock")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status is returned: 0 done, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="weft", description="Serve models as a mesh of gRPC services.")
    parser.add_argument("--version", action="version", version=f"weft {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments.add_up(commands)
    arguments.add_restart(commands)
    arguments.add_infer(commands)
    arguments.add_check(commands)
    arguments.add_top(commands)
    arguments.add_lock(commands)
    arguments.add_rollback(commands)
    arguments.add_feedback(commands)
    arguments.add_key(commands)
    arguments.add_draw(commands)
    arguments.add_explain(commands)
    arguments.add_convert(commands)
    options = parser.parse_args(argv)
    try:
        status: int = import_module(f"{_package(options.command)}.{options.command}").run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whose reader has seen enough, as in `weft check | head`
            print(f"weft {options.command}: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        return 1
    return status


def _package(command: str) -> str:
    return "weft_tools" if command in _TOOLS else "weft_cli"


def _version() -> str:
    try:
        return version("weft")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
