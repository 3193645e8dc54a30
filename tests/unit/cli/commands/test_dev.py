"""`weft dev`: the files that it follows."""

import argparse
from pathlib import Path

from weft.cli.commands.dev import Development


def test_an_editors_lock_is_no_file(tmp_path: Path) -> None:
    """A link to nothing beside the file, as Emacs makes while one types, is passed over."""
    (tmp_path / "mine.py").write_text("")
    (tmp_path / ".#mine.py").symlink_to("someone@host.1")
    options = argparse.Namespace(file=tmp_path / "mine.py", models=tmp_path, port=0, http_port=None, no_ui=True)
    scan = Development(options, tmp_path / "served")._scan()
    assert ["mine.py"] == [name for name, *_ in scan[""]]  # type: ignore[attr-defined]
