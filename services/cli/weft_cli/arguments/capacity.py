"""Arguments of the commands about capacity: ``plan`` and ``tune``."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: "Commands") -> None:
    """Add them to the command line."""
