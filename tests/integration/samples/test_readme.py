"""Every command of the README does what the page says, in the order in which a reader types them."""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.base.processes.process import Endpoint

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line[2:] for _, text in BLOCKS for line in text.splitlines() if line.startswith("$ ")]
MAKE = [command for command in COMMANDS if command.startswith("make ")]
WEFT = [command.removeprefix(".venv/bin/weft ") for command in COMMANDS if command.startswith(".venv/bin/weft ")]
#: How the wheel is installed and tried, which tests/exams/test_first_hour.py does.
FIRST_HOUR = [command for command in COMMANDS if command.startswith(("pip install dist/", "weft "))]
PYTHON = [text for language, text in BLOCKS if language == "python"]
GRAPHS = [text for text in PYTHON if "@weft.graph" in text]
CLIENTS = [text for text in PYTHON if text not in GRAPHS]
#: What each command of the page prints, among other things.
PRINTS = {
    "infer triage": "answer_technical",
    "infer digits": "[[7]]",
    "top": "router",
    "draw": "digits_forest",
    "explain": "answer_billing",
}


def printed(command: list[str]) -> str:
    """Standard output of a command that ends with status 0."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert 0 == result.returncode, result.stderr
    return result.stdout


def test_every_command_is_of_a_kind_that_is_run() -> None:
    """The page has no command that the tests below pass over."""
    assert len(COMMANDS) == len(MAKE) + len(WEFT) + len(FIRST_HOUR)
    assert "up &" in WEFT


@pytest.mark.parametrize("command", MAKE)
def test_targets_of_make_are_there(command: str) -> None:
    """``make`` knows what it would run; the demo has a test of its own, and the tests cannot run themselves."""
    assert printed([*command.split(), "--dry-run"])


@pytest.mark.parametrize("command", [command for command in WEFT if command.split()[0] in ("check", "draw", "explain")])
def test_commands_on_files(command: str) -> None:
    """They need no mesh; ``check`` has nothing to say of a graph that is right."""
    name, text = command.split(maxsplit=1)[0], printed([sys.executable, "-m", "weft.cli", *shlex.split(command)])
    assert text == "" if name == "check" else PRINTS[name] in text


def test_the_graph_in_python_is_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text has the node that the page shows, and it reads a digit without a server."""
    monkeypatch.chdir(ROOT)
    (program,) = GRAPHS
    names: dict[str, Any] = {}
    exec(compile(program, "README.md", "exec"), names)
    (shown,) = (text for language, text in BLOCKS if language == "pbtxt")
    assert names["read_digit"].text.endswith(shown)
    image = (ROOT / "model_repository/data/digits/7.png").read_bytes()
    assert [[7]] == names["read_digit"].run({"IMAGE": [[image]]}).LABEL.tolist()


def test_commands_that_ask_the_mesh(mesh: Mapping[str, Endpoint]) -> None:
    """``weft up`` serves the samples; the commands get its address, for the test leaves the usual port alone."""
    router = mesh["router"]
    for command in WEFT:
        words = shlex.split(command)
        if words[0] == "infer":
            address = ["--url", router.grpc]
        elif words[0] == "top":
            address = ["--url", router.metrics]
        else:
            continue
        expected = PRINTS[" ".join(words[:2])] if words[0] == "infer" else PRINTS[words[0]]
        assert expected in printed([sys.executable, "-m", "weft.cli", *words, *address]), command
    for program in CLIENTS:
        assert program.count('"127.0.0.1:8001"') == 1
        text = printed([sys.executable, "-c", program.replace("127.0.0.1:8001", router.grpc)])
        assert " ".join(text.split()) == "[[ 0. 1. 2. 3. 4. 5. 6. 7. 8. 9. 10. 11. 12. 13. 14. 15.]]"
