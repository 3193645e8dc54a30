"""What docs/testing-graphs.md shows works."""

import re
from pathlib import Path

import pytest
from tests.guide import follow

PAGE = Path(__file__).parents[3] / "docs/testing-graphs.md"


def test_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files and commands in their order, then its tests in Python."""
    follow(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    for name in ("test_safe", "test_quadruple"):
        names[name]()  # type: ignore[operator]
