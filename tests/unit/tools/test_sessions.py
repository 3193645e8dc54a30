"""Commands on files, without a server: what they print and write."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.case_files import Case, cases
from tests.unit.tools.session_files import FOLDER, play

from weft.cli.__main__ import main

WEFT = [sys.executable, "-m", "weft.cli"]


@cases(*sorted(FOLDER.glob("*.txt")))
def test_a_session(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line prints what the session says, and nothing else."""
    play(case, tmp_path, monkeypatch, capsys)


def test_a_folder_that_cannot_be_read_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is told that all is well where not everything was seen; status 2."""
    scandir = os.scandir

    def guarded(path: Path) -> object:
        if str(path).endswith("graphs"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert 2 == main(["check", f"{FOLDER}/check"])
    assert f"weft check: cannot read '{FOLDER}/check/graphs': Permission denied" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_crash(tmp_path: Path) -> None:
    """As in `weft check ... | head`: status 1 and no traceback."""
    (tmp_path / "graph.pbtxt").write_text("broken {")
    with subprocess.Popen(
        [*WEFT, "check", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert 1 == process.wait(20)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_that_cannot_be_written() -> None:
    """The reason is given, in one line."""
    with open("/dev/full", "w") as full:
        command = [*WEFT, "draw", "g", "--repository", f"{FOLDER}/draw"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (1, f"weft draw: [Errno 28] {os.strerror(28)}\n") == (ended.returncode, ended.stderr)


def test_nothing_that_runs_models_is_imported() -> None:
    """A check needs neither the model nor what runs it."""
    code = (
        f"import sys; from weft.cli.__main__ import main; status = main(['check', {str(FOLDER / 'check')!r}]); "
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'onnxruntime', 'tokenizers', 'PIL', 'grpc')))"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_long_lines_are_cut_in_text_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A condition of thousands of characters does not fill the screen; JSON has it whole."""
    condition = " && ".join(f'text(inputs.TEXT) != "{number}"' for number in range(100))
    shutil.copytree(FOLDER / "explain", tmp_path / "repo")
    graph = tmp_path / "repo/graphs/g/1/graph.pbtxt"
    graph.write_text(graph.read_text().replace('text(inputs.TEXT) == "slow"', condition))
    arguments = ["explain", "g", "--repository", f"{tmp_path}/repo"]
    assert 0 == main(arguments)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 200
    assert 0 == main([*arguments, "--json"])
    assert [f"when {condition} = ?"] == json.loads(capsys.readouterr().out)["root"]["steps"][1]["why"]


def test_a_file_of_megabytes_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before it is read as YAML."""
    (tmp_path / "g.yaml").write_bytes(b"x" * 10_000_000)
    assert 2 == main(["convert", f"{tmp_path}/g.yaml"])
    assert "g.yaml has more than 2 MiB, the limit" in capsys.readouterr().err


def test_standard_input_is_converted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As from kubectl; lists of Kubernetes are looked into, with a byte order mark before them or not."""
    first, *lines = (FOLDER / "convert/mine.yaml").read_text().splitlines()
    text = "\n".join(["\ufeffapiVersion: v1\nkind: List\nitems:", f"- {first}", *(f"  {line}" for line in lines)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert 0 == main(["convert", "-"])
    captured = capsys.readouterr()
    assert 'name: "mine"' in captured.out
    assert "standard input:4:3: warning:" in captured.err


def test_without_pyyaml_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an extra, because nothing else needs it."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    for name in [name for name in sys.modules if name.startswith("weft.tools.convert")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "weft.cli.commands.convert", raising=False)
    assert 1 == main(["convert", f"{FOLDER}/convert/mine.yaml"])
    assert "weft convert needs 'yaml': pip install 'weft-mesh[convert]'" in capsys.readouterr().err
