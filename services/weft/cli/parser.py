"""The parser of the command line: an error shows the usage of its command, and what was probably meant."""

import argparse
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from weft.base.errors import UnsupportedError
from weft.base.text.suggestion import suggestion

#: What options were called before, and are called now.
_RENAMED = {"--router": "--url", "--signatures": "--lock", "--format": "--json"}
#: Commands that need more packages than a mesh: the extra that installs them.
_EXTRAS = {"batch": "jobs", "optimize": "optimize"}


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of ``weft`` or of one of its commands.

    Args:
        module: Of a command: has ``add_arguments`` and ``run``; imported when the command's arguments are parsed, so
            that ``weft --help`` loads neither gRPC nor numpy.
        **kwargs: Of argparse.
    """

    def __init__(self, module: str = "", **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | kwargs)
        self._module = module

    def load(self) -> None:
        """Add the command's arguments, once. Raises UnsupportedError where a package that it needs is not installed."""
        if not self._module:
            return
        try:
            module = import_module(self._module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("weft"):
                raise
            extra = _EXTRAS.get(self.prog.rpartition(" ")[2], "mesh")
            text = f"{self.prog} needs '{error.name}': pip install 'weft-mesh[{extra}]'"
            raise UnsupportedError(text) from error
        module.add_arguments(self)
        self.set_defaults(run=module.run)
        self._module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As of argparse, but what is left is an error here, where the command is known, rather than above."""
        self.load()
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._hint(rest)}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with status 2."""
        _, quote, rest = message.partition("COMMAND: invalid choice: '")
        if quote:
            message += suggestion(rest.partition("'")[0], self._commands()).partition("; use one of")[0]
        super().error(message)

    def _hint(self, arguments: Sequence[str]) -> str:
        for argument in arguments:
            option = argument.partition("=")[0]
            if _RENAMED.get(option) in self._option_string_actions:
                return f"; {option} is now {_RENAMED[option]}"
            if option.startswith("--"):
                return suggestion(option, self._option_string_actions).partition("; use one of")[0]
        return ""

    def _commands(self) -> Iterable[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices
