"""What becomes of a step: its conditions, policies, fallback and shadows."""

import pytest

from weft.language import GraphSource
from weft.language.plan import Binding, CallPlan, NodePlan, ShadowPlan
from weft.router.compile import check_graph, compile_graph
from weft.router.operators.splitter import SplitterPlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan

HEAD = """name: "g" max_batch_size: 8 input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "PROBS" data_type: TYPE_FP32 dims: 3 }
"""


def _sequence(*steps):
    return f'node {{ name: "root" sequence {{ {" ".join(steps)} }} }}'


def _messages(found, text, code):
    return [one.message for one in found(text) if one.code == code]


def test_a_fallback_gives_the_same_slots(compiled):
    """A fallback is a whole step in the same frame; its outputs are bound where the step's are, under its own names."""
    fallback = """fallback { name: "wide" model_name: "improve" input_map { key: "DRAFT" value: "F" }
      output_map { key: "BETTER" value: "PROBS" } policy { timeout_ms: 7 } }"""
    text = f"""name: "g" max_batch_size: 8 input [ {{ name: "TEXT" data_type: TYPE_STRING dims: 1 }},
      {{ name: "F" data_type: TYPE_FP32 dims: 3 }} ] output {{ name: "PROBS" data_type: TYPE_FP32 dims: 3 }}
      {_sequence(f'step {{ name: "clf" model_name: "xlmr" {fallback} }}')}"""
    (step,) = compiled(text).root.steps
    assert step.fallback is not None
    assert (Binding("PROBS", 2),) == step.outputs
    assert (Binding("BETTER", 2),) == step.fallback.outputs
    assert (Binding("DRAFT", 1),) == step.fallback.inputs
    assert ("wide", "root/clf>wide", 7) == (step.fallback.name, step.fallback.path, step.fallback.timeout_ms)


def test_a_fallback_may_have_a_fallback_and_be_a_node(compiled):
    """Each is named by its target; a node in it has the path of the step that it stands in for."""
    fallback = 'fallback { node: "n" fallback { model_name: "bert_de" } }'
    nodes = 'node { name: "n" splitter { step { model_name: "bert_en" } } }'
    plan = compiled(_sequence(f'step {{ name: "clf" model_name: "xlmr" {fallback} }}') + nodes)
    first = plan.root.steps[0].fallback
    assert isinstance(first.action, NodePlan)
    assert ("n", "root/clf>n/n[bert_en]") == (first.name, first.action.steps[0].path)
    assert isinstance(first.fallback.action, CallPlan)
    assert "root/clf>n>bert_de" == first.fallback.path
    assert {("model", "xlmr"), ("model", "bert_en"), ("model", "bert_de")} == plan.dependencies


def test_a_sequence_waits_for_what_a_fallback_reads(compiled):
    """A step whose fallback reads a tensor starts after the step that gives it."""
    fallback = 'fallback { model_name: "bert_de" input_map { key: "TEXT" value: "LANG" } }'
    steps = compiled(
        _sequence('step { name: "lid" model_name: "lang_id" }', f'step {{ model_name: "xlmr" {fallback} }}')
    ).root.steps
    assert ["lid", "xlmr"] == [step.name for step in steps]
    assert ((1,), 1) == (steps[0].consumers, steps[1].num_dependencies)


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("lang_id", "G017", "fallback 'lang_id' gives no 'PROBS', which its step gives; it gives: LANG"),
        ("half", "G007", "'PROBS' is FP16 [-1,3] from output 'PROBS' of model 'half' in step 'half'"),
        ("wide", "G008", "a step and its fallback must agree"),
    ],
)
def test_a_fallback_must_give_the_same(found, model, code, message):
    """Outputs that are missing, or of another type or shape, are errors at the fallback's target."""
    (one,) = found(_sequence(f'step {{ name: "clf" model_name: "xlmr" fallback {{ model_name: "{model}" }} }}'))
    assert code == one.code
    assert message in one.message
    assert 4 == one.line


def test_a_fallback_may_lack_what_nobody_reads(found):
    """An output without readers needs no stand-in."""
    assert [] == found(_sequence('step { model_name: "verbose" fallback { model_name: "xlmr" } }'))


def test_limits_reach_the_plan(compiled):
    """Own limits stay where they are; retry, hedge and min_remaining_ms of graph and node hold for calls inside."""
    text = """policy { retry { attempts: 3 backoff_ms: 5 on: "ABORTED" budget_percent: 10 } max_inflight: 9 }
      node { name: "root" policy { hedge { after_ms: 4 } max_inflight: 8 } sequence {
        step { name: "n" node: "n" output_map { key: "LANG" value: "L" } policy { max_inflight: 7 } }
        step { name: "clf" model_name: "xlmr" input_map { key: "TEXT" value: "L" }
               policy { timeout_ms: 30 cache { ttl_ms: 5 max_mib: 2 key: 'request.id' } } } } }
      node { name: "n" sequence { step { model_name: "lang_id" } } }"""
    plan = compiled(HEAD + text)
    outer, call = plan.root.steps
    assert (9, 8, 7) == (plan.max_inflight, plan.root.max_inflight, outer.max_inflight)
    assert () == outer.policies
    cache, retry, hedge = call.policies
    assert RetryPlan(3, 5, frozenset({"ABORTED"}), 10.0) == retry
    assert (retry,) == outer.action.steps[0].policies
    assert HedgePlan(4, 1, 10.0) == hedge
    assert (5, 2 << 20, "request.id") == (cache.ttl_ms, cache.max_bytes, cache.key.source)


def test_limits_are_the_own_ones(compiled):
    """Timeouts and limits of node and graph are not a step's: they hold for node and graph."""
    outer = "policy { timeout_ms: 70 max_inflight: 3 }"
    text = f"""{outer} node {{ name: "root" {outer} sequence {{
        step {{ name: "a" model_name: "lang_id" output_map {{ key: "LANG" value: "L" }} }}
        step {{ name: "b" model_name: "xlmr" input_map {{ key: "TEXT" value: "L" }}
               policy {{ timeout_ms: 5 max_inflight: 2 }} }} }} }}"""
    plan = compiled(HEAD + text)
    assert [(0, 0), (5, 2)] == [(step.timeout_ms, step.max_inflight) for step in plan.root.steps]
    assert [(70, 3)] * 2 == [(one.timeout_ms, one.max_inflight) for one in (plan, plan.root)]


@pytest.mark.parametrize(
    "where", ["policy { cache { ttl_ms: 9 key: 'text(inputs.TEXT)' } }", "response_cache { enable: true }"]
)
def test_a_graph_keeps_whole_answers(compiled, where):
    """policy.cache and Triton Inference Server's response_cache make one cache; a key sees the graph's inputs."""
    plan = compiled(f"{HEAD} {where} " + _sequence('step { model_name: "xlmr" }'))
    assert plan.cache is not None
    assert 64 << 20 == plan.cache.max_bytes
    if "key" in where:
        assert (9, (Binding("TEXT", 0),)) == (plan.cache.ttl_ms, plan.cache.key.tensors)


class InnerGraph:
    """One other graph, "inner".

    Args:
        extra: Fields of the graph.
        policy: Of its root node.
    """

    def __init__(self, extra, policy=""):
        root = f'node {{ name: "root" {policy} sequence {{ step {{ model_name: "xlmr" }} }} }}'
        self._text = f"{HEAD.replace('g', 'inner', 1)} {extra} {root}"

    def find(self, name, version):
        return GraphSource(self._text, "inner.pbtxt", name, "7")

    def names(self):
        return ["inner"]


@pytest.mark.parametrize(("graph", "node", "smaller"), [(3, 0, 3), (0, 3, 3), (3, 2, 2), (2, 3, 2), (0, 0, 0)])
def test_a_nested_graph_has_its_own_limits(catalog, graph, node, smaller):
    """Of a graph and its root node the smaller limit counts; 0 is none."""
    limits = [f"policy {{ timeout_ms: {one} max_inflight: {one} }}" for one in (graph, node)]
    source = GraphSource(HEAD + _sequence('step { graph: "inner" }'), "g.pbtxt")
    inner = compile_graph(source, catalog, InnerGraph(*limits)).root.steps[0].action
    assert ("inner/7", smaller, smaller) == (inner.graph, inner.timeout_ms, inner.max_inflight)


def test_shadows_of_alternatives_are_kept_apart(compiled):
    """A shadow is no alternative: it may give other tensors, has no outputs, and its node runs as a whole."""
    text = """node { name: "root" splitter { step { name: "a" weight: 1 model_name: "xlmr" }
      step { name: "b" model_name: "lang_id" shadow { percent: 5 max_inflight: 4 } when: 'request.priority == 1' }
      step { name: "c" node: "n" shadow { percent: 100 } } } }
      node { name: "n" sequence { step { name: "one" model_name: "lang_id" }
                                  step { name: "two" model_name: "wide" } } }"""
    root = compiled(text).root
    assert (["a"], ["b", "c"]) == ([step.name for step in root.steps], [step.name for step in root.shadows])
    assert [(), ()] == [shadow.outputs for shadow in root.shadows]
    assert [ShadowPlan(5.0, 4), ShadowPlan(100.0, 0)] == [shadow.shadow for shadow in root.shadows]
    assert "request.priority == 1" == root.shadows[0].when.source
    assert ["one", "two"] == [step.name for step in root.shadows[1].action.steps]
    assert (Binding("TEXT", 0),) == root.shadows[0].inputs
    assert 2 == root.num_slots


def test_a_shadow_of_a_sequence_reads_earlier_steps(compiled):
    """It stands among the steps, gives nothing, and waits for what it reads."""
    root = compiled(
        _sequence(
            'step { name: "lid" model_name: "lang_id" output_map { key: "LANG" value: "L" } }',
            'step { name: "copy" model_name: "xlmr" input_map { key: "TEXT" value: "L" } shadow { percent: 50 } }',
            'step { name: "clf" model_name: "xlmr" }',
        )
    ).root
    assert ["lid", "copy", "clf"] == [step.name for step in root.steps]
    assert (None, ShadowPlan(50.0, 0)) == (root.steps[0].shadow, root.steps[1].shadow)
    assert ((1,), 1, ()) == (root.steps[0].consumers, root.steps[1].num_dependencies, root.steps[1].outputs)
    assert () == root.shadows


def test_a_shadow_produces_nothing(found):
    """Nothing can read what a shadow's target gives."""
    steps = ('step { model_name: "xlmr" shadow { percent: 5 } }', 'step { model_name: "bert_de" }')
    assert [] == found(_sequence(*steps))
    (message,) = _messages(found, _sequence(*steps[:1]), "G017")
    assert "nothing in graph 'g' gives output 'PROBS'" in message


def test_inputs_of_a_shadow_are_inputs_of_its_node(compiled):
    """A node that declares no inputs takes from its caller what its shadows need."""
    text = """node { name: "root" sequence { step { name: "lid" model_name: "lang_id" } step { node: "n" } } }
      node { name: "n" splitter { step { weight: 1 model_name: "xlmr" }
        step { name: "s" model_name: "bert_de" input_map { key: "TEXT" value: "LANG" } shadow { percent: 5 } } } }"""
    (step,) = [step for step in compiled(text).root.steps if step.name == "n"]
    assert isinstance(step.action, SplitterPlan)
    assert {"TEXT", "LANG"} == {name for name, _ in step.inputs}


def test_a_decoupled_model_makes_a_decoupled_graph(compiled):
    """A step of the root sequence may call it."""
    plan = compiled(_sequence('step { model_name: "stream" }'))
    assert plan.signature.is_decoupled
    assert plan.root.steps[0].action.signature.is_decoupled
    assert not compiled(_sequence('step { model_name: "xlmr" }')).signature.is_decoupled


@pytest.mark.parametrize(
    "text",
    [
        _sequence('step { model_name: "xlmr" fallback { model_name: "stream" } }'),
        'node { name: "root" splitter { step { weight: 1 model_name: "stream" } } }',
        'node { name: "root" cascade { step { model_name: "stream" } } }',
        _sequence('step { node: "n" }') + 'node { name: "n" sequence { step { model_name: "stream" } } }',
        """node { name: "root" ensemble { combine { output: "PROBS" method: MERGE }
          step { model_name: "xlmr" } step { model_name: "bert_en" } } }""",
    ],
)
def test_a_decoupled_model_anywhere_makes_a_decoupled_graph(compiled, text):
    """A branch, a fallback or a node inside streams, and so do responses that are merged."""
    assert compiled(text).signature.is_decoupled


@pytest.mark.parametrize(
    "steps",
    [
        ('step { model_name: "xlmr" }', 'step { name: "s" model_name: "stream" shadow { percent: 1 } }'),
        (
            'step { model_name: "xlmr" }',
            'step { name: "s" model_name: "stream" output_map { key: "PROBS" value: "P" } }',
        ),
    ],
)
def test_a_stream_that_nobody_reads_makes_no_decoupled_graph(compiled, steps):
    """A shadow's responses are dropped, and a step whose outputs nothing reads does not run."""
    assert not compiled(_sequence(*steps)).signature.is_decoupled


def test_the_cache_of_a_nested_graph_keeps_no_answers(catalog):
    """What is kept of a step is the step's to say; the nested graph's cache is warned of."""
    source = GraphSource(HEAD + _sequence('step { graph: "inner" }'), "g.pbtxt")
    (one,) = check_graph(source, catalog, InnerGraph("response_cache { enable: true }"))
    assert ("G018", "warning") == (one.code, one.severity)
    assert "the cache of graph 'inner' has no effect where it is a step of another graph" in one.message
