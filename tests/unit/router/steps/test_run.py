"""What is derived of a run."""

import pytest
from tests.unit.router import make

from weft.language.request_scope import RequestScope
from weft.router.operators.sequence import SequencePlan
from weft.router.reporting.path import NodeRecord
from weft.router.steps.run import GraphRequest, Run


def run_until(deadline_ns: int | None) -> Run:
    """A run with this deadline."""
    request = GraphRequest(RequestScope({}, {}), {})
    return Run([make.tensor(1.0)], request, deadline_ns, None, NodeRecord("root", SequencePlan.path_form))


@pytest.mark.parametrize(("own_ns", "limit_ns", "expected_ns"), [(None, 5, 5), (9, 5, 5), (5, 5, 5), (3, 5, 3)])
def test_the_earlier_deadline_counts(own_ns: int | None, limit_ns: int, expected_ns: int) -> None:
    """The run itself keeps its own."""
    run = run_until(own_ns)
    assert (expected_ns, own_ns) == (run.until(limit_ns).deadline_ns, run.deadline_ns)


def test_a_fork_writes_and_collects_apart_until_it_is_merged() -> None:
    """Only what bandits chose is shared: those choices were made, whatever becomes of the attempt."""
    run = run_until(None)
    fork = run.fork()
    fork.frame[0] = None
    fork.request.response_parameters["lang"] = "de"
    fork.request.captured["lid/LANG"] = make.tensor(2.0)
    assert ([make.tensor(1.0)], {}, {}) == (run.frame, run.request.response_parameters, run.request.captured)
    run.request.merge(fork.request)
    assert ({"lang": "de"}, {"lid/LANG": make.tensor(2.0)}) == (run.request.response_parameters, run.request.captured)
    assert run.request.pulls is fork.request.pulls
