"""``weft key new``: the key once, its hash in the file."""

from pathlib import Path

import pytest

from weft.base.security.access import KeyRing
from weft.base.security.keys import grant_of, read_keys
from weft.cli.__main__ import main


def test_key_is_printed_once_and_its_line_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has the key alone, so that it can go to a file; the file of keys lets it in, and has no key."""
    keys = tmp_path / "weft.keys"
    keys.write_text("# who may call")  # cut off in the middle of a line
    for name in ("shop", "lab"):
        assert main(["key", "new", name, "--add-to", str(keys)]) == 0
        key = capsys.readouterr().out.strip()
        assert KeyRing([keys]).identify([("x-api-key", key)]).name == name
        assert key.partition(".")[2] not in keys.read_text()


def test_line_is_shown_where_no_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file the line is on standard error, to be put into one by hand."""
    assert main(["key", "new", "shop"]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("{")]
    (tmp_path / "keys").write_text(line)
    assert grant_of(read_keys([tmp_path / "keys"]), out.strip()) is not None


def test_a_name_is_added_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second line of one name, with which no service would start, is refused, and so is a file that is broken."""
    keys = tmp_path / "keys"
    assert main(["key", "new", "shop", "--add-to", str(keys)]) == 0
    before = keys.read_text()
    assert main(["key", "new", "shop", "--add-to", str(keys)]) == 1
    assert "has a line for 'shop'" in capsys.readouterr().err
    assert before == keys.read_text()
    keys.write_text("{broken")
    assert main(["key", "new", "lab", "--add-to", str(keys)]) == 1
    assert keys.read_text() == "{broken"


@pytest.mark.parametrize("arguments", [["a.b"], ["shop", "--add-to", "/no/such/folder/keys"]])
def test_what_cannot_be_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is none, or a file that cannot be written: status 1, the reason, and no key."""
    assert main(["key", "new", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("weft key: ")
