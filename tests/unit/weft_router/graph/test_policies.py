"""Which policy holds for a step."""

import pytest
from google.protobuf import text_format

from weft_protos import graph_pb2 as pb
from weft_router.graph import GraphSource
from weft_router.graph.checks.policies import RETRY_CODES, StepPolicies, cache_limits, step_policies
from weft_router.graph.plan import HedgePlan, RetryPlan
from weft_router.graph.syntax.parse import parse_graph
from weft_router.graph.syntax.report import GraphReport
from weft_router.kinds import KINDS

FILE = parse_graph(GraphSource('name: "g"', "g.pbtxt"), KINDS)
UNAVAILABLE = frozenset({"UNAVAILABLE"})
XLMR = 'step { name: "a" model_name: "xlmr" EXTRA }'


def _policies(step="", node="", graph="", *, is_call=True):
    """(what holds for a step, codes of what was reported)."""
    report = GraphReport("g.pbtxt")
    policies = [text_format.Parse(text, pb.Policy()) for text in (graph, node)]
    message = text_format.Parse(step, pb.Step())
    made = step_policies(FILE, *policies, message, "step", is_call=is_call, report=report)
    return made, [found.code for found in report.diagnostics()]


def test_a_step_without_policies():
    """Nothing limits it and nothing is repeated."""
    assert (StepPolicies(), []) == _policies()


def test_limits_are_the_own_ones():
    """Timeouts and limits of node and graph are not a step's: they hold for node and graph."""
    made, _ = _policies("policy { timeout_ms: 5 max_inflight: 2 }", "timeout_ms: 7", "timeout_ms: 9 max_inflight: 8")
    assert StepPolicies(timeout_ms=5, max_inflight=2) == made
    assert StepPolicies() == _policies(node="timeout_ms: 7 max_inflight: 3")[0]


@pytest.mark.parametrize(
    ("step", "node", "graph", "attempts"),
    [
        ("policy { retry { attempts: 2 } }", "retry { attempts: 3 }", "retry { attempts: 4 }", 2),
        ("", "retry { attempts: 3 }", "retry { attempts: 4 }", 3),
        ("policy { timeout_ms: 3 }", "timeout_ms: 5", "retry { attempts: 4 }", 4),
        ("policy { retry { attempts: 1 } }", "", "retry { attempts: 4 }", 0),
        ("", "retry { attempts: 1 }", "retry { attempts: 4 }", 0),
        ("shadow { percent: 1 }", "", "retry { attempts: 4 }", 0),
    ],
)
def test_the_inner_retry_wins(step, node, graph, attempts):
    """As a whole; one attempt switches it off, and a shadow does not inherit it."""
    retry = _policies(step, node, graph)[0].retry
    assert attempts == (retry.attempts if retry else 0)


def test_a_node_step_inherits_nothing():
    """Defaults of graph and node are for the calls of models; what a step itself says holds for any target."""
    outer = "retry { attempts: 2 } hedge { after_ms: 3 } min_remaining_ms: 4"
    assert StepPolicies() == _policies(node=outer, graph=outer, is_call=False)[0]
    own = f"policy {{ {outer} }}"
    assert (
        StepPolicies(0, 0, 4, RetryPlan(2, 0, UNAVAILABLE, 20.0), HedgePlan(3, 1)) == _policies(own, is_call=False)[0]
    )


def test_what_is_left_out_has_a_default():
    """UNAVAILABLE, 20 %, one more call, 64 MiB until evicted."""
    made, _ = _policies("policy { retry { attempts: 3 } hedge { after_ms: 9 } }")
    assert (RetryPlan(3, 0, UNAVAILABLE, 20.0), HedgePlan(9, 1)) == (made.retry, made.hedge)
    assert (0, 64 << 20) == cache_limits(pb.Cache())


def test_what_is_given_is_kept():
    """All values of a policy reach the plan, in its units."""
    retry = 'retry { attempts: 5 backoff_ms: 7 on: "ABORTED" on: "INTERNAL" budget_percent: 2.5 }'
    made, _ = _policies(f"policy {{ {retry} hedge {{ after_ms: 9 max_extra: 2 }} min_remaining_ms: 8 }}")
    codes = frozenset({"ABORTED", "INTERNAL"})
    assert StepPolicies(0, 0, 8, RetryPlan(5, 7, codes, 2.5), HedgePlan(9, 2)) == made
    assert (250, 3 << 20) == cache_limits(pb.Cache(ttl_ms=250, max_mib=3))


@pytest.mark.parametrize(("node", "graph", "codes"), [("timeout_ms: 5", "", ["G021"]), ("", "timeout_ms: 6", [])])
def test_more_time_than_there_is(node, graph, codes):
    """A step that wants as much time as its node or graph has never runs."""
    assert codes == _policies("policy { min_remaining_ms: 5 }", node, graph)[1]


@pytest.mark.parametrize("code", RETRY_CODES)
def test_every_retry_code_may_be_given(found, code):
    """Codes that are worth another attempt pass without a word."""
    policy = f'policy {{ retry {{ attempts: 2 on: "{code}" }} }}'
    assert [] == found(f'node {{ name: "root" sequence {{ {XLMR.replace("EXTRA", policy)} }} }}')
