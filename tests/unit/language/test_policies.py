"""Which policy holds for a step."""

import pytest
from google.protobuf import text_format

from weft.language import GraphSource
from weft.language.checks.fields import min_remaining_ms
from weft.language.syntax.file import GivenPolicies, GraphReport
from weft.language.syntax.parse import parse_graph
from weft.router.operators import KINDS
from weft.router.policies import POLICIES
from weft.router.policies.cache import CachePlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RETRY_CODES, RetryPlan
from weft_protos import graph_pb2 as pb

FILE = parse_graph(GraphSource('name: "g"', "g.pbtxt"), KINDS, POLICIES)
UNAVAILABLE = frozenset({"UNAVAILABLE"})
XLMR = 'step { name: "a" model_name: "xlmr" EXTRA }'


def _policies(step="", node="", graph="", *, is_call=True):
    """(plan of each policy that a step has and its `min_remaining_ms`, codes of what was reported)."""
    report = GraphReport("g.pbtxt")
    message = text_format.Parse(step, pb.Step())
    around = [text_format.Parse(text, pb.Policy()) for text in (node, graph)]
    given = GivenPolicies(message.policy, around, is_call, message.HasField("shadow"))
    made = {name: plan for name, kind in POLICIES.items() if (plan := kind.plan(given, None)) is not None}
    if limit := min_remaining_ms(FILE, given, "step", report):
        made["min_remaining_ms"] = limit  # type: ignore[assignment]
    return made, [found.code for found in report.diagnostics()]


def test_every_policy_of_the_language_is_registered():
    """By the name of its field; the fields that are numbers are limits."""
    fields = [field.name for field in pb.Policy.DESCRIPTOR.fields if field.message_type is not None]
    assert sorted(fields) == sorted(POLICIES)
    assert all(name == kind.field for name, kind in POLICIES.items())


def test_a_step_without_policies():
    """Nothing limits it and nothing is repeated."""
    assert ({}, []) == _policies()


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
    retry = _policies(step, node, graph)[0].get("retry")
    assert attempts == (retry.attempts if retry else 0)


def test_a_node_step_inherits_nothing():
    """Defaults of graph and node are for the calls of models; what a step itself says holds for any target."""
    outer = "retry { attempts: 2 } hedge { after_ms: 3 } min_remaining_ms: 4"
    assert {} == _policies(node=outer, graph=outer, is_call=False)[0]
    own = f"policy {{ {outer} }}"
    expected = {"retry": RetryPlan(2, 0, UNAVAILABLE, 0.0), "hedge": HedgePlan(3, 1), "min_remaining_ms": 4}
    assert expected == _policies(own, is_call=False)[0]


def test_what_is_left_out_has_a_default():
    """UNAVAILABLE, the share of the router, one more call, 64 MiB until evicted."""
    made, _ = _policies("policy { retry { attempts: 3 } hedge { after_ms: 9 } cache { } }")
    expected = {"cache": CachePlan(0, 64 << 20), "retry": RetryPlan(3, 0, UNAVAILABLE, 0.0), "hedge": HedgePlan(9, 1)}
    assert expected == made


def test_what_is_given_is_kept():
    """All values of a policy reach the plan, in its units."""
    retry = 'retry { attempts: 5 backoff_ms: 7 on: "ABORTED" on: "INTERNAL" budget_percent: 2.5 }'
    cache = "cache { ttl_ms: 250 max_mib: 3 stale_if_error_ms: 4 }"
    made, _ = _policies(f"policy {{ {retry} hedge {{ after_ms: 9 max_extra: 2 }} {cache} min_remaining_ms: 8 }}")
    codes = frozenset({"ABORTED", "INTERNAL"})
    assert {
        "cache": CachePlan(250, 3 << 20, None, 4),
        "retry": RetryPlan(5, 7, codes, 2.5),
        "hedge": HedgePlan(9, 2, 2.5),  # its calls belong to the retry's budget
        "min_remaining_ms": 8,
    } == made


@pytest.mark.parametrize(("node", "graph", "codes"), [("timeout_ms: 5", "", ["G021"]), ("", "timeout_ms: 6", [])])
def test_more_time_than_there_is(node, graph, codes):
    """A step that wants as much time as its node or graph has never runs."""
    assert codes == _policies("policy { min_remaining_ms: 5 }", node, graph)[1]


@pytest.mark.parametrize("code", RETRY_CODES)
def test_every_retry_code_may_be_given(found, code):
    """Codes that are worth another attempt pass without a word."""
    policy = f'policy {{ retry {{ attempts: 2 on: "{code}" }} }}'
    assert [] == found(f'node {{ name: "root" sequence {{ {XLMR.replace("EXTRA", policy)} }} }}')
