"""Commands of ``weft`` where nothing optional is installed: the packages named are refused to every import.

Usage: ``python small_process.py REFUSED,REFUSED ARGUMENTS [then ARGUMENTS]...``; the status of each command is printed,
and the exit status is that of the last.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Refusing(MetaPathFinder):
    """Tells of these packages that they are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: ask the next finder."""
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            raise ModuleNotFoundError(f"No module named '{fullname}'", name=fullname)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusing(sys.argv[1].split(",")))
    from weft.cli.__main__ import main

    commands: list[list[str]] = [[]]
    for argument in sys.argv[2:]:
        if argument == "then":
            commands.append([])
        else:
            commands[-1].append(argument)
    statuses = [main(command) for command in commands]
    print("statuses", statuses)
    sys.exit(statuses[-1])
