"""CONTRIBUTING.md names targets, folders and files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = "services|protos|kernels|model_repository|tests|benchmarks|docs|examples|deploy"


def test_every_target_is_in_the_makefile() -> None:
    """Those of its commands, and those listed beside them."""
    made = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = {target for line in re.findall(r"\bmake ([a-z -]+?)(?:`|  )", PAGE) for target in line.split()}
    listed = PAGE.partition("Beside the four above:")[2].partition("\n\n")[0]
    assert {"demo", "mutants"} < (named := named | set(re.findall(r"`([a-z-]+)`", listed)))
    assert set() == named - made


def test_every_path_exists() -> None:
    """Of the tables, the text and the commands."""
    named = set(re.findall(rf"(?:`|pytest )((?:{FOLDERS})/[\w/.]*)", PAGE))
    assert 20 < len(named)
    assert [] == [path for path in sorted(named) if not (ROOT / path).exists()]
