"""What the command line says to wrong usage, and what its commands have in common."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.__main__ import CommandParser, main, make_parser

#: Commands that print facts; the others write files or drawings.
WITH_FACTS = (
    "up",
    "restart",
    "top",
    "infer",
    "feedback",
    "rollback",
    "lock",
    "key new",
    "check",
    "explain",
    "batch",
    "optimize",
    "train-heads",
    "quantize",
    "plan",
    "tune",
)
CALLING = ("restart", "top", "infer", "feedback", "rollback", "lock", "batch", "stream")


def commands(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if isinstance(command, CommandParser):
                    command.load()
                found |= {prefix + name: command} | commands(command, f"{prefix}{name} ")
    return found


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What wrong usage prints on standard error."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_an_address_has_one_name() -> None:
    """Every command that calls something takes `--url`, and none `--router`."""
    parsers = commands(make_parser())
    assert set(CALLING) == {name for name, parser in parsers.items() if "--url" in parser._option_string_actions}
    assert not any("--router" in parser._option_string_actions for parser in parsers.values())


def test_every_command_that_prints_facts_prints_them_as_json() -> None:
    """They take `--json`."""
    parsers = commands(make_parser())
    assert set(WITH_FACTS) == {name for name, parser in parsers.items() if "--json" in parser._option_string_actions}


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["lock", "--router", "a:1"], "--router is now --url"),
        (["restart", "--router=a:1"], "--router is now --url"),
        (["top", "--router", "a:1"], "--router is now --url"),
        (["convert", "f", "--signatures", "x"], "--signatures is now --lock"),
        (["explain", "g", "--format", "json"], "--format is now --json"),
        (["up", "--repositry", "x"], "did you mean '--repository'?"),
        (["infer", "m", "--tracee"], "did you mean '--trace'?"),
    ],
    ids=" ".join,
)
def test_an_unknown_option_shows_the_usage_of_its_command(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of `weft`; and the name that was meant, or that it has now."""
    text = told(arguments, capsys)
    assert text.startswith(f"usage: weft {arguments[0]} ")
    assert text.endswith(f"; {hint}\n")


def test_an_unknown_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """By its spelling."""
    assert told(["infre"], capsys).endswith("; did you mean 'infer'?\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By a script for it."""
    assert main(["completion", shell]) == 0
    assert "weft" in capsys.readouterr().out


def test_a_shell_gets_options_of_the_command(tmp_path: Path) -> None:
    """As argcomplete asks for them: of `weft lock --u`, `--url` alone."""
    line = "weft lock --u"
    output = tmp_path / "completions"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(output)
    subprocess.run([sys.executable, "-m", "weft.cli"], env=os.environ | asked, check=True, timeout=60)
    assert output.read_text().split() == ["--url"]
