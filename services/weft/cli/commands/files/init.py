"""``weft init``: writes a small working repository."""

import argparse
import shlex
import sys

from weft.tools.starter import write_starter


def run(options: argparse.Namespace) -> int:
    """Write the files and print their paths; 0. Raises WeftError and OSError."""
    for path in write_starter(options.folder):
        print(path)
    folder = shlex.quote(str(options.folder))
    print(f"next: weft up --repository {folder}, then: weft infer quadruple --input X=[3]", file=sys.stderr)
    return 0
