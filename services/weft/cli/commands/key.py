"""``weft key``: makes keys for clients."""

import argparse
import json
import os
import sys
from pathlib import Path

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.security.keys import new_key, read_keys
from weft.base.text.argument_types import add
from weft.cli.arguments import add_json_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft key``."""
    parser.description = (
        "Make a key: it is shown once, on standard output; its line for the file of --auth-keys has only its hash."
    )
    parser.epilog = "example: weft key new shop --add-to weft.keys > shop.key"
    actions = parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser("new", help="make a key")
    add(new, "name NAME", "who will hold it")
    add(new, "--add-to FILE", "append the line to this file; default: print it on standard error", Path)
    add_json_argument(new)


def run(options: argparse.Namespace) -> int:
    """Print a new key and return 0, or print what is wrong and return 1.

    The key is shown once, on standard output; the line with its hash goes to a file, or to standard error.
    """
    try:
        key, line = new_key(options.name)
        if options.add_to is not None:
            if options.add_to.exists() and options.name in read_keys([options.add_to], may_be_empty=True):
                raise InvalidArgumentError(
                    f"'{options.add_to}' has a line for '{options.name}', and a file with two is refused; leave out "
                    "--add-to and put the hash beside the one that is there"
                )
            with options.add_to.open("a+b") as file:
                end = file.seek(0, os.SEEK_END)
                is_cut = end > 0 and _last_byte(file.fileno(), end) != b"\n"
                file.write(b"\n" * is_cut + line.encode() + b"\n")
    except WeftError as error:
        print(f"weft key: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"weft key: '{options.add_to}': {error.strerror}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"name": options.name, "key": key, "line": line}))
        return 0
    if options.add_to is None:
        print(f"The line for the file of --auth-keys:\n{line}\nThe key, which is shown only now:", file=sys.stderr)
    print(key)
    return 0


def _last_byte(descriptor: int, end: int) -> bytes:
    return os.pread(descriptor, 1, end - 1)
