"""Sessions of the command line in text files (``tests/unit/corpus.py``): lines as of a shell, and what they print.

The option ``repository`` names the folder of ``sessions`` whose copy, ``repo``, stands in the working directory, which
is shown as ``~``. Lines that go in:

- ``weft ...`` is run: what it prints on standard output, on standard error behind ``!``, and its status unless 0.
- ``write PATH TEXT`` and ``edit PATH OLD => NEW`` make and change files, with escapes of Python's strings;
  ``mkdir``, ``mv A B``, ``ln A B`` and ``mkfifo`` as of a shell; ``cat PATH`` and ``ls`` print files.
- ``cd PATH`` goes somewhere.

``| head 3`` and ``| grep TEXT`` behind a line leave lines of standard output out.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.case_files import Case

from weft.cli.__main__ import main

FOLDER = Path(__file__).with_name("sessions")


def play(case: Case, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that the lines of a session print what it says."""
    monkeypatch.setattr("weft.cli.__main__._clash", str)  # this machine may have both distributions of ONNX Runtime
    shutil.copytree(FOLDER / case.option("repository"), home / "repo")
    monkeypatch.chdir(home)

    def run(line: str) -> Iterator[str]:
        command, *filters = line.replace("~", str(home)).split(" | ")
        verb, _, rest = command.partition(" ")
        errors: list[str] = []
        if verb == "weft":
            status = main(shlex.split(rest))
            printed, told = (text.splitlines() for text in capsys.readouterr())
            errors = [f"! {text}" for text in told] + [f"status {status}"] * bool(status)
        else:
            printed = _shell(verb, rest)
        for kind, _, value in (one.partition(" ") for one in filters):
            printed = printed[: int(value)] if kind == "head" else [text for text in printed if value in text]
        return (text.replace(str(home), "~") for text in (*printed, *errors))

    case.check_script(run)


def _shell(verb: str, rest: str) -> list[str]:
    name, _, text = rest.partition(" ")
    path = Path(name)
    match verb:
        case "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_unescaped(text))
        case "edit":
            old, new = (_unescaped(part).decode() for part in text.split(" => "))
            assert old in path.read_text(), f"{path} has no {old!r}"
            path.write_text(path.read_text().replace(old, new))
        case "mkdir":
            path.mkdir(parents=True)
        case "mv":
            path.rename(text)
        case "ln":
            Path(text).symlink_to(path.absolute())
        case "mkfifo":
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(path)
        case "cd":
            os.chdir(path)
        case "cat":
            return path.read_text().splitlines()
        case "ls":
            return sorted(str(file) for file in path.rglob("*") if file.is_file())
        case _:
            raise AssertionError(f"no such line: {verb} {rest}")
    return []


def _unescaped(text: str) -> bytes:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape").encode("latin-1")
