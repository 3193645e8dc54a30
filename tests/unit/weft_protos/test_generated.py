"""The committed Python files are what the .proto files generate, and the .proto files explain themselves."""

import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[3] / "protos"
DECLARATION = re.compile(r"^\s*(message|enum|service|rpc)\s+(\w+)")


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", PROTOS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate


def test_committed_files_equal_the_generated_ones(generate, tmp_path):
    """Generating into an empty folder gives exactly the files of protos/weft_protos, byte for byte."""
    written = {path.name: path.read_bytes() for path in generate(tmp_path)}
    folder = PROTOS / "weft_protos"
    committed = {path.name: path.read_bytes() for path in (*folder.glob("*_pb2*.py*"), folder / "comments.json")}
    assert sorted(written) == sorted(committed)
    assert [] == [name for name in written if written[name] != committed[name]]


def test_generation_does_not_need_the_environment_on_path(generate, tmp_path, monkeypatch):
    """The plugin for type stubs is found beside the interpreter, also when PATH does not lead there."""
    monkeypatch.setenv("PATH", "/usr/bin")
    assert "graph_pb2.pyi" in [path.name for path in generate(tmp_path)]


@pytest.mark.parametrize("name", sorted(path.name for path in PROTOS.glob("*.proto")))
def test_every_declaration_has_a_comment(name):
    """Each message, enum, service and RPC has a comment right above it."""
    lines = (PROTOS / name).read_text().splitlines()
    bare = [
        line.strip()
        for above, line in itertools.pairwise(lines)
        if DECLARATION.match(line) and not above.lstrip().startswith("//")
    ]
    assert [] == bare


def test_fields_and_values_of_files_are_documented():
    """The table has what stands above a field, also of one whose name is a word of Python, and above a value."""
    comments = json.loads((PROTOS / "weft_protos/comments.json").read_text())
    assert comments["weft.graph.Combine.from"].startswith("Tensor of the steps; default:")
    assert comments["weft.graph.Combine.Method.SUM"].startswith("Sum of each element;")
