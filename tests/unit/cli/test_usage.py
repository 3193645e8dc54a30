"""What the command line says to wrong usage, and what its commands have in common."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.case_files import Case, cases

from weft.cli.__main__ import COMMANDS, SECTIONS, CommandParser, main, make_parser

#: Commands that print facts; the others write files or drawings.
WITH_FACTS = {
    *("up", "restart", "top", "infer", "feedback", "rollback", "record", "replay", "lock", "key new", "check", "test"),
    *("diff", "rollout", "explain", "batch", "optimize", "quantize", "plan", "tune"),
}
CALLING = (
    *(
        "restart",
        "top",
        "infer",
        "feedback",
        "rollout",
        "rollback",
        "record",
        "replay",
        "lock",
        "stubs",
        "diff",
        "batch",
    ),
    "stream",
)


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


@cases(Path(__file__).with_name("usage.txt"))
def test_wrong_usage(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status, usage and message are as is written down; nothing is started or written."""
    monkeypatch.chdir(tmp_path)
    try:
        status = main(shlex.split(case.title)[1:])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    shown = re.match(r"usage: (weft[a-z -]*)(?= \[| [A-Z{]|\n)", err)
    case.check("\n".join([f"{status}{f', usage of {shown[1]}' if shown else ''}", err.splitlines()[-1]]))
    assert (out, list(tmp_path.iterdir())) == ("", [])


def test_an_address_has_one_name() -> None:
    """Every command that calls something takes `--url`, and none `--router`."""
    parsers = commands(make_parser())
    assert set(CALLING) == {name for name, parser in parsers.items() if "--url" in parser._option_string_actions}
    assert not any("--router" in parser._option_string_actions for parser in parsers.values())


def test_every_command_that_prints_facts_prints_them_as_json() -> None:
    """They take `--json`."""
    parsers = commands(make_parser())
    assert WITH_FACTS == {name for name, parser in parsers.items() if "--json" in parser._option_string_actions}


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


def test_help_has_every_command_in_a_section_and_an_example_of_each() -> None:
    """Of `weft` one for each section, and of each command its own; those of sections are parsed as they stand."""
    assert sorted(COMMANDS) == sorted(name for _, names in SECTIONS.values() for name in names)
    for parser in commands(make_parser()).values():
        assert (parser.epilog or "").startswith("example: ") or parser.prog == "weft key new", parser.prog
    for example, _ in SECTIONS.values():
        for command in re.findall(r"weft ([^&$)]*)", example):
            make_parser().parse_args(shlex.split(command))


HEAVY = ("grpc", "numpy", "google.protobuf", "torch", "weft.base.core", "weft.router.core", "weft.serving")


@pytest.mark.parametrize(("arguments", "heavy"), [([], HEAVY), (["up"], ("numpy", "google.protobuf", "torch"))])
def test_help_imports_nothing_heavy(arguments: list[str], heavy: tuple[str, ...]) -> None:
    """`weft --help` loads neither gRPC nor numpy, nor what of Weft needs them, which keeps it fast."""
    code = (
        "import sys\nfrom weft.cli.__main__ import main\n"
        f"try:\n    main([*{arguments}, '--help'])\nexcept SystemExit as done:\n    assert done.code == 0\n"
        f"print('loaded:', [name for name in {heavy} if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("batch g --input i --output o", "jobs"),
        ("optimize m --data d --max-loss 1%", "plan,torch,transforms"),
    ],
)
def test_a_package_that_is_missing_is_told_by_what_installs_it(
    arguments: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only the base is installed, a command that needs more says so in one line."""
    for name in ("weft.cli.commands.batch", "weft.cli.commands.optimize"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert 1 == main(arguments.split())
    told = capsys.readouterr().err
    assert f"pip install 'weft-mesh[{extra}]'" in told
    assert "Traceback" not in told
