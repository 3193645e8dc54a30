"""A small repository whose files are edited, and all graphs and configurations of this checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[4]
SAMPLES = sorted(path for folder in ("model_repository", "tests") for path in (ROOT / folder).rglob("*.pbtxt"))
MODEL = """\
backend: "python"
max_batch_size: 8
input [
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "HINT" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "LANG" data_type: TYPE_STRING dims: [ 1 ] }, { name: "PROBS" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
GRAPH = """\
name: "outer"
platform: "graph"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "LANG" data_type: TYPE_STRING dims: [ 1 ] } ]
node {
  name: "root"
  sequence {
    step { name: "first" model_name: "lang_id" }
  }
}
"""


def make_repository(folder: Path) -> Path:
    """Write models `lang_id` and `other-lang`, and graphs `inner` and `outer`; returns the file of `outer`."""
    for name in ("lang_id", "other-lang"):
        (folder / "model" / name / "1").mkdir(parents=True)
        (folder / "model" / name / "config.pbtxt").write_text(MODEL)
        (folder / "model" / name / "1/model.py").write_text("class TritonPythonModel: ...\n")
    for name in ("inner", "outer"):
        (folder / "graphs" / name / "1").mkdir(parents=True)
        (folder / "graphs" / name / "1/graph.pbtxt").write_text(GRAPH.replace("outer", name))
    return folder / "graphs/outer/1/graph.pbtxt"
