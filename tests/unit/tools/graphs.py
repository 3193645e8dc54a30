"""Plans compiled from graph files, with the models that those of the router's tests have."""

from pathlib import Path

from tests.unit.language.conftest import FOLDER, FakeCatalog, FolderGraphs

from weft.language import GraphPlan, GraphSource
from weft.router.compile import compile_graph
from weft.tools.offline import load_plan

GOOD = sorted((FOLDER / "good").glob("*.pbtxt"))
REPOSITORY = Path(__file__).parents[3] / "model_repository"
SAMPLES = sorted(path.name for path in (REPOSITORY / "graphs").iterdir())


def compiled(text: str) -> GraphPlan:
    """The plan of a graph's text."""
    return compile_graph(GraphSource(text, "g.pbtxt"), FakeCatalog(), FolderGraphs())


def good(name: str) -> GraphPlan:
    """The plan of one of the good graphs."""
    return compiled((FOLDER / "good" / f"{name}.pbtxt").read_text())


def sample(name: str) -> GraphPlan:
    """The plan of a graph of the sample repository."""
    return load_plan(name, REPOSITORY)


def text_graph(nodes: str, *, outputs: str = "PROBS", header: str = "") -> str:
    """A graph from TEXT and an optional HINT to PROBS (or LABEL)."""
    types = {"PROBS": "TYPE_FP32 dims: [ 3 ]", "LABEL": "TYPE_STRING dims: [ 1 ]", "LANG": "TYPE_STRING dims: [ 1 ]"}
    declared = ", ".join(f'{{ name: "{name}" data_type: {types[name]} }}' for name in outputs.split())
    return f"""name: "g" max_batch_size: 8 {header}
input [ {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }},
        {{ name: "HINT" data_type: TYPE_FP32 dims: [ 4 ] optional: true }} ]
output [ {declared} ]
{nodes}
"""


def many_steps(count: int) -> str:
    """A graph with ``count`` steps, most of them members of an ensemble."""
    members = "\n".join(f'step {{ name: "m{i}" model_name: "bert_en" }}' for i in range(count - 2))
    return text_graph(
        f"""node {{ name: "root" sequence {{
          step {{ name: "lid" model_name: "lang_id" }}
          step {{ name: "all" node: "vote" }}
          step {{ name: "post" model_name: "format_label" input_map {{ key: "P" value: "PROBS" }} }} }} }}
        node {{ name: "vote" ensemble {{ {members} combine {{ output: "PROBS" method: AVERAGE }} }} }}""",
        outputs="PROBS LABEL LANG",
    )


#: Every kind of node and nearly every policy.
RICH = text_graph(
    """policy { timeout_ms: 400 max_inflight: 100 retry { attempts: 2 on: "UNAVAILABLE" backoff_ms: 5 } }
node { name: "root" sequence {
  step { name: "lid" model_name: "lang_id" dependency: SOFT policy { timeout_ms: 30 }
         default { output: "LANG" text: "e\\"n" dims: [ 1 ] } }
  step { name: "clf" node: "by_language" }
  step { name: "post" model_name: "format_label" input_map { key: "P" value: "PROBS" } }
  step { name: "audit" model_name: "format_label" input_map { key: "P" value: "PROBS" }
         shadow { percent: 5 max_inflight: 4 } } } }
node { name: "by_language" switch {
  on: 'get(parameters, "lang", text(inputs.LANG))'
  step { name: "long" when: 'size(text(inputs.TEXT)) > 4000 && text(inputs.TEXT) != "<&>"' model_name: "longformer" }
  step { name: "de" case: "de" case: "nl" node: "careful" }
  step { name: "en" case: "en" node: "ab" }
  step { name: "rest" otherwise: true node: "vote" policy { cache { ttl_ms: 60000 max_mib: 32 } } } } }
node { name: "careful" cascade {
  per_row: true
  step { name: "tiny" model_name: "bert_de" accept: 'max(outputs.PROBS) >= 0.92' }
  step { name: "base" model_name: "xlmr" accept: 'max(outputs.PROBS) >= 0.8'
         when: 'get(parameters, "tier", "std") != "free"' }
  step { name: "large" model_name: "longformer" dependency: SOFT
         policy { timeout_ms: 600 min_remaining_ms: 250 max_inflight: 8 } } } }
node { name: "ab" splitter {
  sticky_by: 'get(headers, "x-user-id", request.id)' salt: "s<1>"
  step { name: "A" weight: 90 model_name: "bert_en" model_version: 3 }
  step { name: "B" weight: 10 model_name: "xlmr" fallback { model_name: "bert_en" }
         policy { timeout_ms: 80 hedge { after_ms: 40 max_extra: 1 } } }
  step { name: "C" model_name: "bert_de" shadow { percent: 1 } } } }
node { name: "vote" ensemble {
  step { name: "one" model_name: "xlmr" weight: 2 }
  step { name: "two" model_name: "bert_en" dependency: SOFT policy { timeout_ms: 20 } }
  step { name: "three" model_name: "hinted" dependency: SOFT when: 'has(inputs.HINT)' }
  quorum: 2 straggler_ms: 25
  combine { output: "PROBS" method: AVERAGE weighted: true } } }""",
    outputs="PROBS LABEL",
)

LOOP = text_graph(
    """node { name: "root" sequence {
  step { name: "again" node: "refine" } } }
node { name: "refine"
  output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] } ]
  sequence {
  step { name: "draft" model_name: "context" }
  step { name: "retext" model_name: "format_label" input_map { key: "P" value: "PROBS" } }
  loop { while: 'max(outputs.PROBS) < 0.9' max_iterations: 4 carry { key: "LABEL" value: "TEXT" } } } }""",
    outputs="PROBS LABEL",
)

CUSTOM = text_graph(
    """node { name: "root" ensemble {
  step { name: "a" model_name: "xlmr" }
  step { name: "b" model_name: "bert_en" dependency: SOFT }
  combine { output: "PROBS" method: CUSTOM
            custom { model_name: "judge" output_map { key: "VERDICT" value: "PROBS" }
                     policy { timeout_ms: 9 } } } } }"""
)


#: Each of the graphs above and of the files, by name.
PLANS = {file.stem: compiled(file.read_text()) for file in GOOD}
PLANS |= {"rich": compiled(RICH), "loop": compiled(LOOP), "custom": compiled(CUSTOM)}
PLANS |= {f"sample {name}": sample(name) for name in SAMPLES}


def plan_of(lines: list[str]) -> GraphPlan:
    """The graph of a kept case.

    ``good:`` and the name of one of the good graphs; ``rich:``, ``loop:`` or ``custom:`` for one of those above;
    ``nodes:`` and the outputs of a graph from TEXT and HINT, whose nodes follow; or a whole graph.
    """
    kind, _, name = lines[0].partition(":")
    if kind == "good":
        return good(name.strip())
    if kind == "nodes":
        return compiled(text_graph("\n".join(lines[1:]), outputs=name))
    return compiled({"rich": RICH, "loop": LOOP, "custom": CUSTOM}.get(kind, "\n".join(lines)))
