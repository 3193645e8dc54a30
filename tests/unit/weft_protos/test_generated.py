"""The committed Python files are what the .proto files generate, and the .proto files explain themselves."""

import contextlib
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

from weft_protos import graph_pb2  # noqa: F401  # fills the pool

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


def test_fields_of_files_are_documented():
    """The table has most fields of graphs, also those whose names are words of Python, and no name that is none."""
    comments = json.loads((PROTOS / "weft_protos/comments.json").read_text())
    assert comments["weft.graph.Combine.from"].startswith("Tensor of the steps; default:")
    pool = descriptor_pool.Default()
    for name in comments:
        kind, _, value = name.rpartition(".")
        try:
            found = pool.FindFieldByName(name)
        except KeyError:
            found = None
        for find in (pool.FindMessageTypeByName, pool.FindEnumTypeByName):
            with contextlib.suppress(KeyError):
                found = found or find(name)
        assert found or value in pool.FindEnumTypeByName(kind).values_by_name
