"""``weft init``: writes a small working repository."""

import argparse
import shlex
import sys
from pathlib import Path

from weft.base.text.argument_types import add
from weft.tools.starter import write_starter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft init``."""
    parser.description = "Write a repository with a model, a graph and their configuration into a new or empty folder."
    parser.epilog = "example: weft init mine && weft up --repository mine"
    add(parser, "folder DIR", "", Path)


def run(options: argparse.Namespace) -> int:
    """Write the files and print their paths; 0. Raises WeftError and OSError."""
    for path in write_starter(options.folder):
        print(path)
    folder = shlex.quote(str(options.folder))
    print(f"next: weft up --repository {folder}, then: weft infer quadruple --input X=[3]", file=sys.stderr)
    return 0
