"""What timeouts and retries of a whole graph add up to: G021 and G022."""

import pytest

ACCEPT = "accept: 'max(outputs.PROBS) > 0.5'"
SOFT = "dependency: SOFT"
INNER = 'node {{ name: "inner" policy {{ {} }} sequence {{ {} }} }}'


def _step(policy="", name="a", extra="", target='model_name: "xlmr"'):
    return f'step {{ name: "{name}" {target} policy {{ {policy} }} {extra} }}'


def _root(node, policy="timeout_ms: 50"):
    return f'node {{ name: "root" policy {{ {policy} }} {node} }}'


def _codes(found, text, code):
    return [one for one in found(text) if one.code == code]


def _fallback(policy):
    return f'fallback {{ model_name: "bert_de" policy {{ {policy} }} }}'


@pytest.mark.parametrize(
    ("node", "is_warned"),
    [
        (f"sequence {{ {_step('timeout_ms: 50')} }}", False),
        (f"sequence {{ {_step('timeout_ms: 51')} }}", True),
        (f"sequence {{ {_step('timeout_ms: 26 retry { attempts: 2 }')} }}", False),
        (f"sequence {{ {_step('timeout_ms: 26', extra=_fallback('timeout_ms: 25'))} }}", True),
        (f"cascade {{ {_step('timeout_ms: 30', extra=ACCEPT)} {_step('timeout_ms: 21', 'b')} }}", True),
        (f"cascade {{ {_step('timeout_ms: 30', extra=ACCEPT)} {_step('timeout_ms: 21', 'b', SOFT)} }}", False),
        (f"splitter {{ {_step('timeout_ms: 30')} {_step('timeout_ms: 30', 'b')} }}", False),
        (f"splitter {{ {_step('timeout_ms: 30')} {_step('timeout_ms: 51', 'b')} }}", True),
        (f"splitter {{ {_step('timeout_ms: 30')} {_step('timeout_ms: 51', 'b', 'shadow { percent: 1 }')} }}", False),
        (f"ensemble {{ {_step('timeout_ms: 30')} combine {{ output: 'PROBS' method: AVERAGE }} }}", False),
    ],
)
def test_steps_against_the_time_of_their_node(found, node, is_warned):
    """Steps of a cascade and fallbacks come one after another; attempts share a deadline; alternatives do not add."""
    assert is_warned == bool(_codes(found, _root(node), "G021"))


def test_only_what_waits_for_one_another_adds_up(found):
    """Two steps side by side count by the longer one; a third that reads from both comes after it."""
    text = _root(
        "sequence { "
        + _step("timeout_ms: 30", "a", 'output_map { key: "PROBS" value: "A" }')
        + _step("timeout_ms: 20", "b", 'output_map { key: "PROBS" value: "B" }')
        + _step("timeout_ms: 21", "c", 'output_map { key: "SUM" value: "PROBS" }', 'model_name: "add"')
        + "}"
    )
    (warning,) = _codes(found, text, "G021")
    assert (
        "root/a (30 ms) -> root/c (21 ms) may take 51 ms one after another, but node 'root' has 50" in warning.message
    )
    assert [] == _codes(found, text.replace("timeout_ms: 21", "timeout_ms: 20"), "G021")


@pytest.mark.parametrize(
    ("own", "steps", "is_warned"),
    [
        ("timeout_ms: 60", _step("timeout_ms: 40"), False),
        ("timeout_ms: 60", _step(), True),
        ("", _step("timeout_ms: 60"), True),
        ("timeout_ms: 40", _step(), False),
    ],
)
def test_a_nested_node_takes_what_it_may(found, own, steps, is_warned):
    """Its own limit where a step inside has none, else the sum of its steps."""
    text = _root('sequence { step { node: "inner" } }')
    assert is_warned == bool(_codes(found, text + INNER.format(own, steps), "G021"))


@pytest.mark.parametrize(
    ("outer", "inner", "num_calls"),
    [
        ("", "retry { attempts: 4 }", 0),
        ("", "retry { attempts: 5 }", 5),
        ("retry { attempts: 2 }", "retry { attempts: 2 }", 0),
        ("retry { attempts: 2 }", "retry { attempts: 3 }", 6),
        ("retry { attempts: 2 }", "retry { attempts: 2 } hedge { after_ms: 1 }", 8),
        ("hedge { after_ms: 1 max_extra: 4 }", "", 5),
    ],
)
def test_attempts_multiply(found, outer, inner, num_calls):
    """Retries and hedges of a step, times those of what it runs; four calls are allowed."""
    step = _step(outer, target='node: "inner"')
    text = _root(f"sequence {{ {step} }}", "") + INNER.format("", _step(inner))
    warnings = _codes(found, text, "G022")
    assert bool(num_calls) == bool(warnings)
    assert all(f"one request may become {num_calls} calls" in one.message for one in warnings)


def test_a_fallback_adds_its_own_attempts(found):
    """The calls of a step and those of its fallback come one after the other."""
    step = _step("retry { attempts: 3 }", extra=_fallback("retry { attempts: 2 }"))
    (warning,) = _codes(found, _root(f"sequence {{ {step} }}", ""), "G022")
    assert "5 calls: 3 attempts of root/a (g.pbtxt:4:" in warning.message
    assert "+ 2 attempts of root/a>bert_de (g.pbtxt:4:" in warning.message


def test_the_worst_step_of_another_graph_counts(found):
    """A retry around a graph multiplies what that graph does inside; the place of the inner one is its own file."""
    step = 'step { name: "a" graph: "inner" policy { retry { attempts: 5 } } }'
    (warning,) = _codes(found, _root(f"sequence {{ {step} }}", ""), "G022")
    assert "one request may become 5 calls: 5 attempts of root/a (g.pbtxt:4:" in warning.message
