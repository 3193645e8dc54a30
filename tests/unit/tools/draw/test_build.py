"""What of a plan is in its diagram."""

import pytest
from tests.unit.tools.graphs import CUSTOM, LOOP, RICH, compiled, good, text_graph

from weft.tools.draw.build import Edge, Group, Item, Stroke, build_diagram

STREAMED = text_graph("""node { name: "root" sequence { step { name: "n" node: "side" } } }
  node { name: "side" ensemble { combine { output: "PROBS" method: MERGE }
    step { name: "a" model_name: "stream" } step { name: "one" model_name: "xlmr" } } }""")


def box(diagram: Group, title: str) -> Item | Group:
    """The only box of that title; of a step with a fallback, the step itself."""
    found = [one for one in diagram.boxes() if one.title == title]
    return found[-1] if len(found) > 1 and isinstance(found[0], Group) and found[0].kind == "fallback" else found[0]


def edge(diagram: Group, source: str, target: str) -> Edge:
    """The edge between two boxes, by title, of the innermost group that has both."""
    for group in (one for one in diagram.boxes() if isinstance(one, Group)):
        titles = {item.id: item.title for item in group.items}
        for one in group.edges:
            if (titles[one.source], titles[one.target]) == (source, target):
                return one
    raise AssertionError(f"no edge from {source} to {target}")


@pytest.fixture(scope="module")
def rich() -> Group:
    """The diagram of a graph with every kind of node."""
    return build_diagram(compiled(RICH))


def test_every_node_is_a_box_with_its_kind(rich):
    """Nodes are groups inside the group of their caller, with their kind."""
    outer = {"g/1": "sequence", "clf: by_language": "switch"}
    inner = {"de: careful": "cascade", "en: ab": "splitter", "rest: vote": "ensemble", "B": "fallback"}
    assert outer | inner == {one.title: one.kind for one in rich.boxes() if isinstance(one, Group)}
    switch = box(rich, "clf: by_language")
    assert ["long", "de: careful", "en: ab", "rest: vote"] == [item.title for item in switch.items[1:-1]]


def test_a_step_shows_model_and_policies(rich):
    """A pinned version follows the model; policies stand below it, those of the graph worked in."""
    assert "bert_en@3" == box(rich, "A").lines[0]
    assert ["xlmr", "timeout 80 ms", "2 attempts on UNAVAILABLE, backoff 5 ms", "hedge after 40 ms, 1 extra call"] == (
        box(rich, "B").lines
    )
    assert {"soft: goes on without it", "timeout 600 ms", "at most 8 in flight", "needs 250 ms left"} <= set(
        box(rich, "large").lines
    )
    assert ["cache 60000 ms, 32 MiB"] == box(rich, "rest: vote").lines
    assert ["timeout 400 ms", "at most 100 in flight", "batch of at most 8"] == rich.lines


def test_the_tooltip_of_a_step_names_the_version_and_the_target(rich):
    """What the file leaves to the target is told as it was when the graph was compiled."""
    assert "model longformer, version 3 as compiled, on 'model'" == box(rich, "long").tooltip.splitlines()[0]


def test_edges_are_tensors_with_datatype_and_shape(rich):
    """An edge names the tensor, its datatype and its shape; names at its ends follow where they differ."""
    assert ["TEXT BYTES [batch, 1]"] == edge(rich, "request", "lid").lines
    assert ["PROBS FP32 [batch, 3] → P"] == edge(rich, "clf: by_language", "post").lines
    assert ["OUT → image FP32 [batch, 3, 224, 224] → X"] == edge(build_diagram(good("classify")), "pre", "ab").lines


def test_a_graph_without_batching_has_no_batch_dimension():
    """The batch dimension is shown where there is one only."""
    text = text_graph('node { name: "root" sequence { step { name: "s" model_name: "single" } } }')
    diagram = build_diagram(compiled(text.replace("max_batch_size: 8", "max_batch_size: 0")))
    assert ["TEXT BYTES [1]"] == edge(diagram, "request", "s").lines


def test_branches_carry_their_tests(rich):
    """Cases, tests and shares stand on the edges to the branches."""
    first = "first that holds"
    assert 'case "de", "nl"' == edge(rich, first, "de: careful").lines[0]
    assert "otherwise" == edge(rich, first, "rest: vote").lines[0]
    assert edge(rich, first, "long").lines[0].startswith("when size(text(inputs.TEXT)) > 4000 && ")
    assert ["90 %", "10 %"] == [edge(rich, "one by weight", name).lines[0] for name in "AB"]
    assert 'on get(parameters, "lang", text(inputs.LANG))' == box(rich, first).lines[0]
    assert ['sticky by get(headers, "x-user-id", request.id)', "salt s<1>"] == box(rich, "one by weight").lines


def test_a_cascade_goes_from_step_to_step(rich):
    """`accept` stands on the way out, "not accepted" and `when` on the way on; per_row is said."""
    leave = "first accepted, else the last answer"
    assert ["accept max(outputs.PROBS) >= 0.92", "PROBS FP32 [batch, 3]"] == edge(rich, "tiny", leave).lines
    assert ["not accepted", 'when get(parameters, "tier", "std") != "free"', "TEXT BYTES [batch, 1]"] == (
        edge(rich, "tiny", "base").lines
    )
    assert "each row: in order until accepted" == box(rich, "de: careful").items[0].title


def test_an_ensemble_shows_how_answers_are_combined(rich):
    """Methods, quorum and stragglers stand where the answers meet; weights and tests at the members."""
    assert ["PROBS: AVERAGE, weighted", "quorum 2 of 3", "stragglers 25 ms"] == box(rich, "combine").lines
    assert "weight 2" == edge(rich, "all at once", "one").lines[0]
    assert ["when has(inputs.HINT)", "weight 1"] == edge(rich, "all at once", "three").lines[:2]


def test_a_model_that_combines_is_a_box_between():
    """Members lead to the model that combines them, which also reads inputs of the node and leads to the end."""
    diagram = build_diagram(compiled(CUSTOM))
    assert ["judge", "timeout 9 ms"] == box(diagram, "judge").lines
    assert ["PROBS FP32 [batch, 3]"] == edge(diagram, "a", "judge").lines
    assert ["PROBS FP32 [batch, 3] (may be absent)"] == edge(diagram, "b", "judge").lines
    assert ["TEXT BYTES [batch, 1]"] == edge(diagram, "request: all at once", "judge").lines
    assert ["VERDICT → PROBS FP32 [batch, 3]"] == edge(diagram, "judge", "answer: combine").lines
    assert "PROBS: CUSTOM by judge" in box(diagram, "answer: combine").lines


def test_what_models_may_leave_out_is_marked():
    """An optional output of a model is marked wherever it goes; the answer says which of its outputs are optional."""
    steps = """node { name: "root" sequence {
      step { name: "first" model_name: "unsure" output_map { key: "PROBS" value: "P" }
             output_map { key: "HINT" value: "H" } }
      step { name: "soft" model_name: "context" input_map { key: "HINT" value: "H" } } } }"""
    optional = 'output [ { name: "H" data_type: TYPE_FP32 dims: [ 4 ] optional: true },'
    diagram = build_diagram(compiled(text_graph(steps).replace("output [", optional)))
    assert "HINT → H FP32 [batch, 4] → HINT (may be absent)" in edge(diagram, "first", "soft").lines
    assert "HINT → H FP32 [batch, 4] (may be absent)" in edge(diagram, "first", "answer").lines
    assert "H FP32 [batch, 4], optional" in box(diagram, "answer").lines


def test_a_bandit_shows_its_algorithm():
    """A splitter that learns says so, with what the algorithm uses."""
    text = text_graph(
        """node { name: "root" splitter { bandit { algorithm: EPSILON_GREEDY epsilon: 0.2 min_pulls: 5 }
          step { name: "a" weight: 1 model_name: "xlmr" } step { name: "b" weight: 3 model_name: "bert_en" } } }"""
    )
    entry = build_diagram(compiled(text)).items[0]
    assert "request: one by feedback" == entry.title
    assert ["EPSILON_GREEDY, epsilon 0.2", "first 5 requests for each by weight"] == entry.lines[-2:]


def test_optional_and_absent_tensors_are_marked(rich):
    """An optional input, and what may be absent, say so; a default takes that away."""
    assert "HINT FP32 [batch, 4], optional" in box(rich, "request").lines
    assert "HINT FP32 [batch, 4] (may be absent)" in edge(rich, "all at once", "three").lines
    assert ["PROBS FP32 [batch, 3] (may be absent)"] == edge(rich, "three", "combine").lines
    assert 'LANG defaults to "e\\"n"' in box(rich, "lid").lines
    assert ["LANG BYTES [batch, 1]"] == edge(rich, "lid", "clf: by_language").lines


def test_soft_steps_are_dashed_shadows_dotted_and_failures_dashed(rich):
    """The outline and the edges of soft steps are dashed, those of shadows dotted, the way to a fallback is dashed."""
    assert (Stroke.DASHED, Stroke.DASHED) == (box(rich, "lid").stroke, edge(rich, "lid", "clf: by_language").stroke)
    assert (Stroke.DOTTED, Stroke.DOTTED) == (box(rich, "audit").stroke, edge(rich, "clf: by_language", "audit").stroke)
    assert "shadow of 5 % of requests, at most 4 at once" in box(rich, "audit").lines
    assert (["on error"], Stroke.DASHED) == (edge(rich, "B", "bert_en").lines, edge(rich, "B", "bert_en").stroke)
    assert Stroke.SOLID is edge(rich, "request", "lid").stroke


def test_a_loop_goes_back_to_its_inputs():
    """A loop has an edge against the direction of the others, and says how often and what it carries."""
    diagram = build_diagram(compiled(LOOP))
    back = edge(diagram, "outputs", "inputs")
    assert back.is_back
    assert ["again while max(outputs.PROBS) < 0.9", "LABEL becomes TEXT"] == back.lines
    assert "at most 4 rounds" == box(diagram, "again: refine").lines[0]


def test_what_a_condition_reads_is_an_edge():
    """In a sequence, a tensor that only a condition reads comes by an edge that says so; so does steps.x.ok."""
    text = text_graph(
        """node { name: "root" sequence {
          step { name: "lid" model_name: "lang_id" dependency: SOFT }
          step { name: "clf" model_name: "xlmr" when: 'has(inputs.LANG) && text(inputs.LANG) == "de"' dependency: SOFT
                 default { output: "PROBS" number: [ 0, 0, 1 ] dims: [ 3 ] } }
          step { name: "post" model_name: "format_label" when: 'steps.lid.ok' input_map { key: "P" value: "PROBS" }
                 default { output: "LABEL" text: "none" dims: [ 1 ] } } } }""",
        outputs="PROBS LABEL",
    )
    diagram = build_diagram(compiled(text))
    assert ["LANG (for when)"] == edge(diagram, "lid", "clf").lines
    assert ["steps.lid.ok (for when)"] == edge(diagram, "lid", "post").lines
    assert "PROBS defaults to [0.0, 0.0, 1.0]" in box(diagram, "clf").lines


def test_what_streams_says_so():
    """Steps whose model is decoupled, nodes that stream because of one inside, and the graph."""
    diagram = build_diagram(compiled(STREAMED))
    assert ["batch of at most 8", "answers with a stream of responses"] == diagram.lines
    assert {"n: side": True, "a": True, "one": False} == {
        name: "streams" in box(diagram, name).lines for name in ("n: side", "a", "one")
    }
    assert "at most 4 responses of a stream in work" in box(build_diagram(good("streamed")), "streamed/1").lines


def test_ordered_steps_are_joined_though_no_tensor_passes():
    """Where a step waits for another without reading from it, an edge says "then"."""
    text = text_graph(
        """node { name: "root" sequence { ordered: true
          step { name: "lid" model_name: "lang_id" }
          step { name: "clf" model_name: "xlmr" } } }""",
        outputs="PROBS LANG",
    )
    assert ["then"] == edge(build_diagram(compiled(text)), "lid", "clf").lines


def test_a_nested_graph_names_its_version():
    """A step that is another graph is titled with that graph's name and version."""
    titles = [one.title for one in build_diagram(good("nested")).boxes() if isinstance(one, Group)]
    assert {"one: inner/7", "two: inner/7"} <= set(titles)


def test_a_huge_condition_is_cut():
    """Text on an edge has a bounded length; the tooltip has it all."""
    condition = " && ".join(f'text(inputs.TEXT) != "{number}"' for number in range(100))
    text = text_graph(
        f"""node {{ name: "root" switch {{
          step {{ name: "a" when: '{condition}' model_name: "xlmr" }}
          step {{ name: "b" otherwise: true model_name: "bert_en" }} }} }}"""
    )
    diagram = build_diagram(compiled(text))
    found = next(one for one in diagram.edges if one.tooltip)
    assert max(map(len, found.lines)) <= 60
    assert f"when {condition}" == found.tooltip.splitlines()[0]


def test_the_graph_shows_its_own_tensors_whatever_its_root_is():
    """Request and answer list the graph's inputs and outputs, also where the root is no sequence."""
    diagram = build_diagram(good("moderate"))
    assert ["request: each row: in order until accepted", "TEXT BYTES [batch, 1]"] == [
        diagram.items[0].title,
        diagram.items[0].lines[0],
    ]
    assert "answer: first accepted, else the last answer" == diagram.items[-1].title
