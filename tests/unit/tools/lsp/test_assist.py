"""Completions, documentation and definitions, in texts that are being typed."""

import random
from pathlib import Path

from tests.case_files import Case, cases
from tests.unit.tools.lsp.repository import ROOT, SAMPLES, make_repository

from weft.tools.check import check
from weft.tools.lsp.assist import Place
from weft.tools.lsp.workspace import Workspace

_INSERTED = ["", "{", "}", "[", "]", ":", '"', "'", "#", ",", "step {", "model_name:", "\\", "\0", "\u2028", "é😀"]


@cases(Path(__file__).with_name("assist.txt"))
def test_what_is_shown(case: Case, tmp_path: Path) -> None:
    """At the cursor stands what the case says."""
    path = make_repository(tmp_path)
    path = tmp_path / case.option("file") if case.option("file") else path
    before, _, behind = case.text.partition("|")
    place = Place(Workspace(), path, {path: before + behind}, len(before))
    lines = []
    for one in place.completions():
        changed = (before[: one.start] + one.text).rpartition("\n")[2] if case.option("shows") == "line" else ""
        lines.append(" ".join(filter(None, [one.label, f"({one.detail})" * bool(one.detail), changed])))
    if hover := place.hover():
        lines += ["hover:", *filter(None, hover.splitlines())]
    if (found := place.definition()) is not None:
        file, offset = found
        text = before + behind if file == path else ""
        lines.append(f"definition: {file.relative_to(tmp_path)}:{text.count(chr(10), 0, offset) + 1}")
    case.check("\n".join(lines))


def test_nothing_that_is_typed_makes_it_fail() -> None:
    """Files that are cut off and mutated are checked, and assisted at any place, without an exception."""
    draw, workspace = random.Random(7), Workspace()
    for _ in range(60):
        path = draw.choice([path for path in SAMPLES if path.name in ("graph.pbtxt", "config.pbtxt")])
        text = path.read_text()
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(_INSERTED) + text[draw.choice([at, at + 1, at + 9, len(text)]) :]
        workspace.check(path, {path: text})
        for _ in range(3):
            place = Place(workspace, path, {path: text}, draw.randrange(len(text) + 1))
            list(place.completions())
            place.hover()
            place.definition()


def test_a_file_that_nests_without_end_is_assisted() -> None:
    """Neither the depth nor the length of what is typed is a matter."""
    path = ROOT / "model_repository/graphs/digits/1/graph.pbtxt"
    for text in ("node { sequence { step { " + "fallback { " * 5000, "[" * 5000, "a" * 100_000, "name: '" * 5000):
        assert list(Place(Workspace(), path, {path: text}, len(text)).completions()) is not None
        assert Workspace().check(path, {path: text})


def test_a_check_of_unsaved_text_is_that_of_the_command() -> None:
    """Every graph and configuration of the samples has the same diagnostics, text for text and place for place."""
    workspace = Workspace()
    for path in sorted((ROOT / "tests/unit/tools/sessions").rglob("*.pbtxt")):
        found = [one for one in check([path], None) if one.file == str(path)]
        assert found == workspace.check(path, {path: path.read_text()})
