"""``weft completion``: prints a script that completes the arguments of ``weft`` in a shell."""

import argparse

from argcomplete.shell_integration import shellcode

from weft.base.text.argument_types import add


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft completion``."""
    parser.description = "Print a script that makes a shell complete the arguments of weft."
    parser.epilog = 'example: eval "$(weft completion bash)"'
    add(parser, "shell", "", choices=("bash", "zsh", "fish", "tcsh", "powershell"))


def run(options: argparse.Namespace) -> int:
    """Print a script for the shell; 0."""
    print(shellcode(["weft"], shell=options.shell))
    return 0
