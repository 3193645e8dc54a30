"""The reference of the public names, made of their docstrings, and the examples in these."""

import doctest
import os
from pathlib import Path
from typing import Any

import pytest
from tests.public_names import own_names, page
from tests.unit.mesh.serving import serving
from tests.unit.v2.client.test_connect import Core

import weft

PAGE = Path(__file__).parents[3] / "docs" / "python-reference.md"


def test_the_page_is_what_the_docstrings_say() -> None:
    """WEFT_UPDATE_GOLDEN writes it."""
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        PAGE.write_text(page(), encoding="utf-8")
    assert page() == PAGE.read_text(encoding="utf-8")


def test_every_public_name_has_a_docstring() -> None:
    """Classes, functions and modules."""
    assert [] == [name for name, thing in own_names() if callable(thing) and not thing.__doc__]


def _examples() -> list[Any]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [one for name, thing in own_names() if callable(thing) for one in finder.find(thing, name)]
    return [pytest.param(one, id=one.name) for one in found if one.examples]


@pytest.mark.parametrize("example", _examples())
def test_an_example(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a docstring shows is what comes out; `address` is that of a server with the model `double`."""
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    with serving(Core()) as address:
        example.globs.update(weft=weft, address=address)
        failed, tried = doctest.DocTestRunner(verbose=False).run(example, out=shown.append)
    assert tried
    assert not failed, "".join(shown)
