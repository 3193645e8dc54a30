"""What the client of a graph reads when something fails: where, which model, which attempt, what was tried instead."""

from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.text_graphs import BATCHING, HEAD, compiled, sequence, x, y

from weft.base.errors import WeftError

pytestmark = pytest.mark.usefixtures("virtual_clock")


async def failure(plan: Any, *values: float, **scripts: Any) -> tuple[str, str]:
    """Code and message of a request that fails."""
    with pytest.raises(WeftError) as caught:
        await make.run(plan, FakeTarget(**scripts), x(*values))
    return caught.value.code, caught.value.message


async def test_an_error_tells_path_model_attempt_fallback_and_the_status_before() -> None:
    """The status is that of the last failure; the one that began it is in the text."""
    plan = compiled(
        sequence(
            'step { name: "clf" model_name: "bert" fallback { model_name: "xlmr" } '
            'policy { timeout_ms: 80 retry { attempts: 2 on: "ABORTED" } } }'
        )
    )
    scripts = {"bert": failing("ABORTED", "busy"), "xlmr": failing("UNAVAILABLE", "gone")}
    text = "g/1: root/clf -> bert@1: busy, attempt 2 of 2 (ABORTED); fallback xlmr: UNAVAILABLE: gone"
    assert ("UNAVAILABLE", text) == await failure(plan, **scripts)


async def test_a_graph_in_a_graph_in_a_graph_gives_the_whole_way() -> None:
    """Every step, and the node in its place; the fallback is one of the way."""
    inner = HEAD.replace('"g"', '"inner"') + sequence('step { name: "deep" model_name: "m" }')
    middle = HEAD.replace('"g"', '"middle"') + sequence('step { name: "in" graph: "inner" }')
    bad = HEAD.replace('"g"', '"bad"') + sequence('step { name: "s" model_name: "n" }')
    nodes = sequence('step { name: "mid" graph: "middle" fallback { name: "other" graph: "bad" } }')
    plan = compiled(nodes, middle=middle, inner=inner, bad=bad)
    scripts = {"m": failing("DATA_LOSS", "no"), "n": failing("ABORTED", "nor here")}
    code, text = await failure(plan, **scripts)
    assert "ABORTED" == code
    assert (
        "g/1: root/mid/root/in/root/deep -> m@1: no (DATA_LOSS); "
        "fallback other: ABORTED: root/mid>other/root/s -> n@1: nor here"
    ) == text


async def test_an_attempt_that_ran_out_of_time_says_how_much_it_had() -> None:
    """The step's own timeout, with what is left of it for the second attempt."""
    plan = compiled(
        sequence('step { name: "s" model_name: "m" policy { timeout_ms: 80 retry { attempts: 2 on: "UNKNOWN" } } }')
    )
    answers = in_turn(failing("UNKNOWN", after_ms=50), answering(1, after_ms=900))
    code, text = await failure(plan, m=answers)
    assert ("DEADLINE_EXCEEDED", "g/1: root/s -> m@1: no answer of 'm' in 30 ms, attempt 2 of 2") == (code, text)


ROWS = """node { name: "root" switch { per_row: true
  step { name: 'low' when: 'inputs.X[0] < 2.0' model_name: 'low' MORE }
  step { name: "high" otherwise: true model_name: "high" } } }"""


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ((5, 1, 6, 1), " (rows 1, 3 of 4)"),
        ((5, 1), " (row 1 of 2)"),
        ((1, 1), ""),
        ((*[1] * 12, 9), " (rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... of 13)"),
    ],
)
async def test_an_error_of_some_rows_tells_which(values: tuple[float, ...], rows: str) -> None:
    """Numbered as in the request; where all rows went the same way there is nothing to tell."""
    plan = compiled(ROWS.replace("MORE", ""), BATCHING)
    code, text = await failure(plan, *values, low=failing())
    assert ("UNAVAILABLE", f"g/1: root[low] -> low@1: gone{rows}") == (code, text)


async def test_an_error_of_a_cascade_tells_the_rows_that_had_come_so_far() -> None:
    """Rows 0 and 2 were accepted before; nested per-row nodes number the rows that they were given.

    The first step has all rows, so its error has nothing to tell.
    """
    nodes = """node { name: "root" cascade { per_row: true
      step { name: 'a' model_name: 'a' accept: 'outputs.Y[0] > 5.0' } step { name: "b" node: "inner" } } }"""
    plan = compiled(nodes + ROWS.replace('"root"', '"inner"').replace("MORE", ""), BATCHING)
    text = "g/1: root[b]/inner[low] -> low@1: gone (row 1 of 2) (rows 1, 3 of 4)"
    assert ("UNAVAILABLE", text) == await failure(plan, 9, 3, 8, 1, low=failing())
    assert ("UNAVAILABLE", "g/1: root[a] -> a@1: gone") == await failure(plan, 9, 3, a=failing())


async def test_a_condition_that_fails_on_a_row_tells_which() -> None:
    """Numbered as in the request, though the test saw only the rows that were left: 1 / 0 is in row 2."""
    nodes = """node { name: "root" switch { per_row: true
      step { name: 'a' when: 'inputs.X[0] > 5.0' model_name: 'a' }
      step { name: 'b' when: '1 / int(inputs.X[0]) > 0' model_name: 'b' }
      step { name: "c" otherwise: true model_name: "c" } } }"""
    code, text = await failure(compiled(nodes, BATCHING), 9, 1, 0, 8)
    assert ("INVALID_ARGUMENT", True) == (code, "node 'root', row 2" in text), text


async def test_a_soft_failure_with_status_cancelled_is_a_failure() -> None:
    """A model may answer CANCELLED by itself; a cascade or an ensemble without an answer says so."""
    scripts = {"a": failing("CANCELLED", "stopped"), "b": failing("CANCELLED", "stopped")}
    steps = " ".join(f'step {{ name: "{name}" model_name: "{name}" dependency: SOFT ACCEPT }}' for name in "ab")
    accepting = steps.replace("ACCEPT", "accept: 'outputs.Y[0] > 0.0'", 1).replace("ACCEPT", "")
    cascade = f'node {{ name: "root" cascade {{ {accepting} }} }}'
    assert ("CANCELLED", "g/1: root[b] -> b@1: stopped") == await failure(compiled(cascade), **scripts)
    combine = 'combine { output: "Y" method: SUM }'
    ensemble = f'node {{ name: "root" ensemble {{ {steps.replace("ACCEPT", "")} {combine} }} }}'
    code, text = await failure(compiled(ensemble), **scripts)
    assert ("CANCELLED", 2) == (code, text.count("failed: CANCELLED")), text


async def test_a_member_that_is_still_trying_has_not_failed() -> None:
    """Its fallback was at work when the quorum was out of reach, so its first failure is not among the causes."""
    members = """step { name: "a" model_name: "a" fallback { model_name: "slow" } }
      step { name: "b" model_name: "b" dependency: SOFT }"""
    nodes = f'node {{ name: "root" ensemble {{ {members} quorum: 2 combine {{ output: "Y" method: SUM }} }} }}'
    scripts = {"a": failing("DATA_LOSS"), "b": failing(after_ms=5), "slow": answering(1, after_ms=50)}
    code, text = await failure(compiled(nodes), **scripts)
    assert ("UNAVAILABLE", True) == (code, "a was still running; b failed: UNAVAILABLE: root[b] -> b@1" in text), text


async def test_a_fallback_in_a_cascade_needs_its_own_time() -> None:
    """`min_remaining_ms` of the step decides whether it is its turn, that of the fallback whether it is called."""
    nodes = """node { name: "root" cascade { step { name: "z" model_name: "z" accept: "outputs.Y[0] > 0.0" }
      step { name: "a" model_name: "a" dependency: SOFT
        fallback { model_name: "b" policy { min_remaining_ms: 50 } } } } }"""
    for timeout_ms, expected in ((100, 7), (60, -1)):
        target = FakeTarget(z=answering(-1), a=failing(after_ms=40), b=answering(7))
        context = make.context(timeout_ms=timeout_ms)
        assert expected == y(await make.run(compiled(nodes), target, x(), context=context))
