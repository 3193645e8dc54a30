"""What is explained of requests, by kept cases: a graph, what is known of a request, and the tree of its steps.

Files of ``cases/`` have the form of the router's (``tests/unit/router/graph_cases.py``) with graphs as ``plan_of`` of
``tools/graphs.py`` reads them. A request has ``X=JSON`` or ``X=shape:1,3`` for an input, ``param.NAME=``,
``header.NAME=``, ``id=``, ``priority=``, ``remaining=`` in ms, ``outputs=``, and ``gives=`` and ``lacks=`` of outputs
that models may leave out. Lines ``calls`` and ``time`` are the totals below the tree.
"""

from pathlib import Path
from typing import Any

from tests.case_files import Case, cases
from tests.unit.router.graph_cases import check_requests, requests_of, text_of
from tests.unit.tools.explain.explanation import explained
from tests.unit.tools.graphs import plan_of

from weft.base.errors import InvalidArgumentError
from weft.tools.explain.render import render_text


def question_of(text: str) -> dict[str, Any]:
    """What is known of a request, as ``read_question`` takes it."""
    pairs: dict[str, list[tuple[str, str]]] = {"inputs": [], "shapes": [], "param": [], "header": []}
    more: dict[str, Any] = {}
    for token in text.split():
        key, _, value = token.partition("=")
        kind, _, name = key.partition(".")
        if name:
            pairs[kind].append((name, value))
        elif key.isupper():
            pairs["shapes" if value.startswith("shape:") else "inputs"].append((key, value.removeprefix("shape:")))
        elif key in ("outputs", "gives", "lacks"):
            more[key] = value.split(",")
        elif key == "id":
            more["request_id"] = value
        else:
            more[{"remaining": "remaining_ms"}.get(key, key)] = int(value)
    return {"parameters": pairs.pop("param"), "headers": pairs.pop("header"), **pairs, **more}


@cases(*Path(__file__).parent.glob("cases/*.txt"))
def test_a_request_is_explained(case: Case) -> None:
    """Each step with its mark: what is certain, what is not, and on what that depends."""
    plan, answers = plan_of(text_of(case)), []
    for line, expected in requests_of(case):
        try:
            text = render_text(explained(plan, **question_of(line[3:])), None)
        except InvalidArgumentError as error:
            text = f"\nrefused: {error.message}\n\n"
        tree, _, rest = text.partition("\n\n")
        kinds = {"the", *(line.split()[0] for line in expected)}
        answers.append([*tree.splitlines()[1:], *(line for line in rest.splitlines()[1:] if line.split()[0] in kinds)])
    check_requests(case, answers)
