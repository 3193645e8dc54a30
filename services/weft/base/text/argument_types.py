"""Helpers for command-line options, and value types that raise argparse's usage error."""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

#: Most processes on one port.
MAX_WORKERS = 64

_T = TypeVar("_T")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_METADATA_NAME = re.compile(r"[0-9a-z_.-]+(?<!-bin)")


def add(
    parser: argparse._ActionsContainer,
    spec: str,
    text: str = "",
    kind: Callable[[str], Any] = str,
    default: Any = None,
    **more: Any,
) -> None:
    """Add an argument.

    Args:
        spec: Names, metavar, and default, shown in the help: ``"-o --output FILE"``, ``"--rows N (32)"``, ``"graph
            GRAPH"``. With ``...`` at the end, an option may be repeated, and gives a list; without a metavar it is a
            flag.
    """
    names = [part for part in spec.split() if part.startswith("-")] or spec.split()[:1]
    rest = spec.split()[len(names) :]
    if names[0].startswith("-") and not rest and "choices" not in more:
        more["action"] = "store_true"
    else:
        more |= {"type": kind, "default": default}
    if rest[-1:] == ["..."]:
        rest.pop()
        more |= {"action": "append", "default": []}
    elif rest and rest[-1].startswith("("):
        told = rest.pop()[1:-1]
        more["default"] = kind(told)
        text = f"{text}{'; ' if text else ''}default: {told}"
    if rest:
        more["metavar"] = rest[0]
    parser.add_argument(*names, help=text or None, **more)


def given_arguments(options: argparse.Namespace, names: Iterable[str]) -> Iterator[str]:
    """Yield some arguments again, for the command line of another process; those without a value are left out."""
    for name in names:
        option, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if value is True:
            yield option
        elif value is not None and value is not False and value != "":
            yield from (f"{option}={one}" for one in (value if isinstance(value, list) else [value]))


def argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Adapt a parser for argparse, which hides the text of a ValueError."""

    def parsed(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return value


def time_s(text: str) -> float | None:
    """Seconds of a time with its unit: 500ms, 90s, 1.5m, 2h; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    return float(found[1]) * _UNITS_S[found[2]] if found else None


def num_workers(text: str) -> int:
    """Number of processes on one port."""
    number = int(text)
    if not 1 <= number <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text} workers cannot be had; give 1 to {MAX_WORKERS}")
    return number


def positive_integer(text: str) -> int:
    """An integer above 0."""
    return _integer(text, minimum=1)


def not_negative_integer(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, minimum=0)


def _integer(text: str, *, minimum: int) -> int:
    value = int(text)
    if value < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text}")
    return value


def is_metadata_name(name: str) -> bool:
    """Whether a lower-case name is valid for ASCII metadata of gRPC."""
    return _METADATA_NAME.fullmatch(name) is not None
