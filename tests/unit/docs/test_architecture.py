"""docs/architecture.md names modules that exist, and the walk of a request says how long they are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text()
SERVICES = ROOT / "services/weft"


def test_every_module_of_the_map_exists() -> None:
    """Paths in the first column of its tables."""
    named = re.findall(r"(?m)^\| `([\w/]+\.py)` \|", PAGE)
    assert 60 < len(named)
    assert [] == [path for path in named if not (SERVICES / path).is_file()]


def test_the_walk_states_the_length_of_its_modules() -> None:
    """At most twelve modules, each within a tenth of the lines that the page says."""
    walk = re.findall(r"(?m)^\| \d+ \| \[`([\w/]+\.py)`\]\(\S+\) \| (\d+) \|", PAGE)
    assert 0 < len(walk) <= 12
    lines = {path: len((SERVICES / path).read_text().splitlines()) for path, _ in walk}
    assert [] == [path for path, stated in walk if abs(int(stated) - lines[path]) > lines[path] / 10]
