"""The files for CI systems in examples/ci are YAML whose commands the command line takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.cli.__main__ import make_parser

FILES = sorted((Path(__file__).parents[3] / "examples/ci").glob("*.yml"))


def texts(node: Any) -> Iterator[str]:
    """Every text in a YAML document."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for one in node.values() if isinstance(node, dict) else node:
            yield from texts(one)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_commands_of_a_file_are_taken(file: Path) -> None:
    """`weft test`, `diff` and `replay`, each with arguments that exist; what follows a redirection is the shell's."""
    lines = [line for text in texts(yaml.safe_load(file.read_text())) for line in text.splitlines()]
    named = []
    for line in filter(re.compile("weft ").match, lines):
        plain = re.sub(r"\$\(.*\):", "main:", line.partition(" > ")[0].partition(" >> ")[0])
        options = make_parser().parse_args(shlex.split(plain)[1:])
        named.append(options.command)
    assert ["test", "diff", "replay"] == named
