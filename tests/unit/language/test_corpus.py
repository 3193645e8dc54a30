"""Graphs as text: what the compiler says of them, and what they become; WEFT_UPDATE_GOLDEN=1 writes the files anew."""

import re

from tests.case_files import Case, cases
from tests.unit.language.conftest import FOLDER, FakeCatalog, with_head
from tests.unit.language.plan_text import plan_text

from weft.language import GraphSource
from weft.router.compile import check_graph, compile_graph

MODEL = re.compile(r"^model (\w+) (\d+) (.*) -> (.*)\n", re.MULTILINE)


def _read(text: str) -> tuple[FakeCatalog, GraphSource]:
    models = {name: (int(batch), inputs, outputs) for name, batch, inputs, outputs in MODEL.findall(text)}
    return FakeCatalog(models), GraphSource(with_head(MODEL.sub("", text)), "g.pbtxt")


def _said(catalog, source, graphs):
    found = check_graph(source, catalog, graphs)
    return [f"{one.line}:{one.column} {one.severity} {one.code}: {one.message}" for one in found]


@cases(*(FOLDER / "plans").glob("*.txt"))
def test_the_plan_of_a_graph(case: Case, graphs):
    """Each graph has the plan that is written below it, after what is warned of; and no error without a catalog."""
    catalog, source = _read(case.text)
    assert "error" not in {one.severity for one in check_graph(source)}
    case.check("\n".join([*_said(catalog, source, graphs), plan_text(compile_graph(source, catalog, graphs))]))


@cases(*(FOLDER / "findings").glob("*.txt"))
def test_what_is_said_of_a_graph(case: Case, graphs):
    """Each graph has the findings that are written below it, or is fine."""
    catalog, source = _read(case.text)
    case.check("\n".join(_said(catalog, source, graphs)) or "fine")
