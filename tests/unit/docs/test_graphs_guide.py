"""What docs/graphs.md and model_repository/README.md show works."""

import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from google.protobuf import message_factory, text_format

from weft.base.signature import TensorSpec
from weft.base.text.pbtxt import Diagnostic, render
from weft.cli import __main__ as weft
from weft.language import GraphSource
from weft.router.compile import check_graph
from weft.tools.offline import OfflineCatalog
from weft_protos import graph_pb2, model_config_pb2

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs/graphs.md").read_text()
SAMPLES = (ROOT / "model_repository/README.md").read_text()
GOLDEN = ROOT / "tests/unit/language/bad"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", GUIDE, flags=re.MULTILINE | re.DOTALL)
CODE = [" ".join(part.split()) for part in PROSE.split("`")[1::2]]

#: The whole file that the roots of other examples stand in.
FRAME = next(text for _, text in BLOCKS if 'name: "by_size"' in text).partition("node {")[0]
#: A graph with every tensor and step that conditions of the guide name.
AROUND = """name: "g"
platform: "graph"
max_batch_size: 32
input [
  { name: "PIXELS" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] },
  { name: "LABEL" data_type: TYPE_INT64 dims: [ 1 ] },
  { name: "HINT" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "A" data_type: TYPE_INT64 dims: [ 1 ] }, { name: "C" data_type: TYPE_INT64 dims: [ 1 ] } ]
node { name: "root" sequence {
  step {
    name: "tiny" model_name: "digits_tiny" dependency: SOFT default { output: "A" integer: 0 }
    output_map { key: "LABEL" value: "A" } output_map { key: "PROBS" value: "B" }
  }
  step {
    name: "x" model_name: "digits_cnn" when: 'CONDITION' default { output: "C" integer: 0 }
    output_map { key: "LABEL" value: "C" } output_map { key: "PROBS" value: "D" }
  }
} }
"""


@cache
def models() -> OfflineCatalog:
    """The sample models."""
    return OfflineCatalog(ROOT / "model_repository")


def found(text: str) -> list[Diagnostic]:
    """Errors and warnings of a graph over the sample models."""
    return check_graph(GraphSource(text, "docs/graphs.md"), models())


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "pbtxt"])
def test_a_graph_of_the_guide_is_right(text: str) -> None:
    """Whole files, and roots in the frame that they are said to stand in, pass `weft check` without a warning."""
    assert "" == render(found(text if text.startswith("name:") else FRAME + text))


@pytest.mark.parametrize(
    "condition", [line for language, text in BLOCKS if language == "cel" for line in text.split("\n")]
)
def test_a_condition_of_the_guide_compiles(condition: str) -> None:
    """With the types of the tensors it names."""
    assert [] == [
        d.message for d in found(AROUND.replace("CONDITION", condition or "true")) if d.code in ("G010", "G011")
    ]


def test_every_code_is_explained() -> None:
    """The table has exactly the codes that files can be refused with."""
    explained = set(re.findall(r"\bG\d{3}\b", GUIDE.partition("## What `weft check` says")[2]))
    assert {file.stem[:4].upper() for file in GOLDEN.glob("*.pbtxt")} == explained


@pytest.mark.parametrize("code", sorted(code for code in {*CODE} if re.match(r"(?!graph_trace)[a-z_]+(: | \{)", code)))
def test_a_piece_of_a_graph_has_fields_of_one_message(code: str) -> None:
    """What the text shows of the language can be parsed where some message stands; "..." stands for anything."""
    types = graph_pb2.DESCRIPTOR.message_types_by_name
    messages = [*map(message_factory.GetMessageClass, types.values()), model_config_pb2.ModelInput]
    fitting = []
    for message in messages:
        try:
            text_format.Parse(code.replace(" ... }", " }"), message())
        except text_format.ParseError:
            continue
        fitting.append(message)
    assert fitting


def commands(text: str) -> list[str]:
    """What a reader would type: lines of shell blocks, and code that begins with `weft`."""
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line[2:].partition("#")[0].strip(" &") for block in blocks for line in block.split("\n")]
    return [line for line in (*lines, *text.split("`")[1::2]) if re.match(r"(\.venv/bin/)?weft \w+ .", line)]


@pytest.mark.parametrize("command", sorted({*commands(GUIDE), *commands((ROOT / "README.md").read_text())}))
def test_a_command_of_the_guide_is_taken(command: str) -> None:
    """Its flags and arguments exist; "..." stands for more of them."""
    assert weft.make_parser().parse_args(shlex.split(command.replace(" ... ", " "))[1:]).run


def test_the_sample_models_are_listed_with_their_tensors() -> None:
    """Every model of the repository is in the table, with names, datatypes and shapes as its configuration has them."""
    rows = [line.strip("| ").split(" | ") for line in SAMPLES.split("\n") if re.match(r"\| `\w+`", line)]
    listed = {
        name: (cells[-2], cells[-1]) for cells in rows if len(cells) == 3 for name in re.findall(r"`(\w+)`", cells[0])
    }
    expected = {}
    for name in models().names():
        signature = models().find(name, "")
        assert signature is not None
        (config,) = (ROOT / "model_repository").glob(f"*/{name}/config.pbtxt")
        text = config.read_text()  # the backend of a language model adds others
        expected[name] = (
            _tensors([spec for spec in signature[1].inputs if f'"{spec.name}"' in text]),
            _tensors([spec for spec in signature[1].outputs if f'"{spec.name}"' in text]),
        )
    assert expected == listed


def _tensors(specs: Sequence[TensorSpec]) -> str:
    """Tensors of one type together: ``A, B FP32 [16]``."""
    groups: dict[str, list[str]] = {}
    for spec in specs:
        kind = f"{'STRING' if spec.datatype == 'BYTES' else spec.datatype} {list(spec.dims)}"
        groups.setdefault(kind, []).append(f"`{spec.name}`")
    return ", ".join(f"{', '.join(names)} {kind}" for kind, names in groups.items())
