"""Problems, files and limits that are refused: what is said, by ``refused.txt``."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import says, table
from tests.unit.capacity.placement.problems import GIB, H100, gpus
from tests.unit.capacity.tuning.test_requests import SIGNATURE, write

from weft.base.errors import InvalidArgumentError
from weft.capacity.devices import find_device
from weft.capacity.placement import Device, Problem, Workload
from weft.capacity.placement.outputs import load
from weft.capacity.placement.problem import read_fleet
from weft.capacity.tuning.load import from_data
from weft.capacity.tuning.measurement import parse_limit

MODEL = Workload("m", GIB, {"*": 0.1})
GPU = Device("", H100, 80 * GIB, index=0, max_models=4, cost_per_hour=2.5)


def _problem(fields: dict[str, Any], path: Path) -> object:
    models = tuple(replace(MODEL, **each) for each in fields.pop("workloads", [{}]))
    return Problem(models, tuple(replace(gpus(1)[0], **each) for each in fields.pop("devices", [{}])), **fields)


def _file(name: str, read: Callable[[Path], object]) -> Callable[[str, Path], object]:
    def write_and_read(text: str, folder: Path) -> object:
        (folder / name).write_text(text, encoding="latin-1")
        return read(folder / name)

    return write_and_read


#: What is done with a row's value, by its heading; ``path`` is a folder.
_READ: dict[str, Callable[[Any, Path], object]] = {
    "workload": lambda fields, path: Problem((replace(MODEL, **fields),), gpus(1)),
    "device": lambda fields, path: Problem((MODEL,), (replace(gpus(1)[0], **fields),)),
    "problem": _problem,
    "fleet": _file("fleet.toml", lambda path: read_fleet(path, GPU)),
    "own device": _file("mine.toml", lambda path: find_device(str(path))),
    "saved plan": _file("plan.json", load),
    "limit": lambda text, path: parse_limit(text),
    "recording": lambda rows, path: from_data(
        SIGNATURE, write(path / "d.jsonl", rows), column_of={}, rows=1, recorded=True
    ),
}
_NAMES_ITS_FILE = {"fleet": "fleet.toml", "own device": "mine.toml", "saved plan": "plan.json"}


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [row for row in table(Path(__file__).with_name("refused.txt")) if row.values[0] in _READ],
)
def test_what_is_refused(tmp_path: Path, kind: str, text: str, words: str) -> None:
    """The message names the file, the field, the value and what is allowed."""
    with pytest.raises(InvalidArgumentError) as caught:
        _READ[kind](json.loads(text), tmp_path)
    assert says(words, caught.value.message), caught.value.message
    assert _NAMES_ITS_FILE.get(kind, "") in caught.value.message


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [("fleet", "x" * (2 << 20), "is larger than"), ("saved plan", "[" * 100_000, "plan.json")],
)
def test_large_files_are_refused(tmp_path: Path, kind: str, text: str, words: str) -> None:
    """Too large, or nested too deeply."""
    with pytest.raises(InvalidArgumentError) as caught:
        _READ[kind](text, tmp_path)
    assert words in caught.value.message
