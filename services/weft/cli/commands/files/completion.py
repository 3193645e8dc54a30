"""``weft completion``: what makes a shell complete the arguments of ``weft``."""

import argparse

from argcomplete.shell_integration import shellcode


def run(options: argparse.Namespace) -> int:
    """Print a script for the shell; 0."""
    print(shellcode(["weft"], shell=options.shell))
    return 0
