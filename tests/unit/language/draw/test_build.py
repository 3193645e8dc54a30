"""What of a plan is in its diagram, by kept cases: a graph, and its diagram as text.

Graphs are as ``plan_of`` of ``tools/graphs.py`` reads them.
"""

from pathlib import Path

from tests.case_files import Case, cases
from tests.unit.tools.graphs import plan_of

from weft.language.draw.build import build_diagram
from weft.language.draw.formats import render_text


@cases(*Path(__file__).parent.glob("cases/*.txt"))
def test_a_graph_is_drawn(case: Case) -> None:
    """Each box with its lines, and below it where its tensors come from."""
    case.check(render_text(build_diagram(plan_of(case.lines))).rstrip("\n"))


def test_a_condition_that_is_cut_is_whole_in_the_tooltip() -> None:
    """Text on an edge has a bounded length; the tooltip has it all."""
    condition = " && ".join(f'text(inputs.TEXT) != "{number}"' for number in range(100))
    steps = (
        f"""step {{ name: "a" when: '{condition}' model_name: "xlmr" }} step {{ otherwise: true model_name: "xlmr" }}"""
    )
    diagram = build_diagram(plan_of(["nodes: PROBS", f'node {{ name: "root" switch {{ {steps} }} }}']))
    found = next(one for one in diagram.edges if one.tooltip)
    assert max(map(len, found.lines)) <= 60
    assert f"when {condition}" == found.tooltip.splitlines()[0]
