"""The pictures of rooms in the READMEs of packages, beside the import contracts."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = {
    container: [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
    for contract in CONTRACTS
    for container in contract.get("containers", ())
}
READMES = sorted(path for path in (ROOT / "services").glob("*/README.md") if "\n## Rooms\n" in path.read_text())


def rooms(path: Path, names: set[str]) -> list[str]:
    """The rooms that a README shows, from top to ground; of several pictures that of the package itself."""
    pictures = re.findall(r"```\n(.*?)```", path.read_text().partition("\n## Rooms\n")[2], re.DOTALL)
    shown = [[name for line in picture.splitlines() for name in first_words(line, names)] for picture in pictures]
    return max(shown, key=lambda picture: len(set(picture)), default=[])


def first_words(line: str, names: set[str]) -> list[str]:
    """The names of rooms that a line begins with."""
    found = []
    for word in line.replace("►", " ").split() if not line.startswith(" ") else ():
        if word not in names or (found and word in found):
            break
        found.append(word)
    return found


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_picture_is_the_contract(path: Path) -> None:
    """Every room of the contract is shown once, none above one that it may not import."""
    layers = LAYERS[f"weft_{path.parent.name}"]
    level = {name: index for index, layer in enumerate(layers) for name in layer}
    shown = rooms(path, set(level))
    assert sorted(level) == sorted(shown)
    assert sorted(map(level.__getitem__, shown)) == [level[name] for name in shown]


def test_picture_of_the_engine_is_the_contract() -> None:
    """The engine of language models has a picture of its own."""
    layers = LAYERS["weft.llm"]
    level = {name: index for index, layer in enumerate(layers) for name in layer}
    shown = rooms(ROOT / "services/weft/backends/README.md", set(level))
    assert sorted(level) == sorted(shown)
    assert sorted(map(level.__getitem__, shown)) == [level[name] for name in shown]


def test_every_package_has_a_picture() -> None:
    """All services, and the packages of the command line."""
    assert {path.parent for path in (ROOT / "services").glob("*/README.md")} == {path.parent for path in READMES}
