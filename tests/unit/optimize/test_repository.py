"""A model in its repository: found with the graphs that call it, and staged for a trial."""

import os
from pathlib import Path

import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.base.text.pbtxt import PbtxtError, parse
from weft.optimize.source import (
    GraphUse,
    RepositoryModel,
    alone,
    check_pinned,
    choose_graph,
    find_model,
    graphs_that_call,
    model_files,
    stage_version,
    staged_config,
)
from weft_protos.model_config_pb2 import ModelConfig

TENSORS = """max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def add_model(repository: Path, name: str, versions: tuple[int, ...] = (1,), more: str = "", file: str = "") -> Path:
    """A model whose files have no meaning."""
    folder = repository / name
    for version in versions:
        (folder / str(version)).mkdir(parents=True)
        (folder / str(version) / (file or "model.onnx")).write_bytes(b"")
    backend = "python" if file == "model.py" else "onnxruntime"
    (folder / "config.pbtxt").write_text(f'name: "{folder.name}"\nbackend: "{backend}"\n{TENSORS}{more}')
    return folder


def add_graph(repository: Path, name: str, *steps: str) -> None:
    """A sequence of one step or two, each given by its fields; the second reads what the first gives."""
    folder = repository / "graphs" / name / "1"
    folder.mkdir(parents=True)
    maps = ['output_map { key: "X" value: "Y" }', 'input_map { key: "X" value: "Y" }'] if len(steps) > 1 else [""]
    written = "".join(f'step {{ name: "s{i}" {steps[i]} {maps[i]} }}\n' for i in range(len(steps)))
    (folder / "graph.pbtxt").write_text(
        f'name: "{name}"\nplatform: "graph"\n{TENSORS}node {{ name: "root" sequence {{ {written} }} }}'
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model that two graphs call, one of them through another, and models that have nothing to do with it."""
    root = tmp_path / "repository"
    add_model(root, "model/m", (1, 3))
    for name in ("other", "unused"):
        add_model(root, f"model/{name}")
    add_model(root, "preprocess/before", file="model.py")
    (root / "model/m/labels.txt").write_text("a")
    add_graph(root, "inner", 'model_name: "m"')
    add_graph(root, "outer", 'graph: "inner"', 'model_name: "other"')
    add_graph(root, "away", 'model_name: "other"')
    add_graph(root, "broken", 'model_name: "none"')
    return root


def test_the_version_that_is_served_is_found(repository: Path) -> None:
    """Or the one that is asked for."""
    found = find_model(repository, "m")
    assert (3, [1, 3], "model") == (found.version, list(found.versions), found.service)
    assert repository / "model/m/3/model.onnx" == found.source.file
    assert 1 == find_model(repository, "m", 1).version


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("mm", None, "has no model 'mm'; did you mean 'm'"),
        ("outer", None, "has no model 'outer'; a graph has that name: give one of the models that it calls"),
        ("m", 2, "'m' has no version 2; it has 1, 3"),
        ("../m", None, "Invalid model name"),
        ("code", None, "runs on the backend 'python'; there are methods for onnxruntime and pytorch"),
        ("bare", None, "has no config.pbtxt, where the origin of the new version is to be noted"),
        ("empty", None, "'empty' has no file 1/model.onnx"),
    ],
)
def test_a_model_that_cannot_be_optimised_is_told(repository: Path, name: str, version: int | None, told: str) -> None:
    """With the cure."""
    add_model(repository, "model/code", file="model.py")
    (add_model(repository, "model/bare") / "config.pbtxt").unlink()
    (add_model(repository, "model/empty") / "1/model.onnx").unlink()
    with pytest.raises(WeftError, match=told):
        find_model(repository, name, version)


def test_a_wrong_configuration_is_told_with_its_place(repository: Path) -> None:
    """As `weft check` does."""
    (repository / "model/m/config.pbtxt").write_text('name: "m"\nbackend: "onnxruntime"\nmax_batch: 3')
    with pytest.raises(PbtxtError, match=r"config\.pbtxt:3:1: error"):
        find_model(repository, "m")


def test_graphs_that_call_the_model_are_found(repository: Path) -> None:
    """Through other graphs too; those with errors are left out."""
    assert ["inner", "outer"] == [use.name for use in graphs_that_call(repository, "m")]
    assert [] == graphs_that_call(repository, "unused")


def choice(repository: Path, asked: str, model: str = "m") -> str | None:
    """Name of the graph that is chosen."""
    plan = choose_graph(asked, find_model(repository, model), graphs_that_call(repository, model))
    return None if plan is None else plan.signature.name


def test_the_graph_is_chosen_or_the_only_one(repository: Path) -> None:
    """A model without graphs, or its own name, means straight to the model."""
    assert "outer" == choice(repository, "outer/1")
    assert choice(repository, "m") is None
    assert choice(repository, "", "unused") is None
    with pytest.raises(InvalidArgumentError, match="the graphs inner, outer call 'm'; --graph names the one"):
        choice(repository, "")
    with pytest.raises(InvalidArgumentError, match="graph 'away' does not call 'm'; graphs that do: inner, outer"):
        choice(repository, "away")
    with pytest.raises(NotFoundError, match="no graph of"):
        choice(repository, "nowhere")


def with_policy(repository: Path, policy: str) -> RepositoryModel:
    """The model with a version policy."""
    config = repository / "model/m/config.pbtxt"
    config.write_text(config.read_text() + policy)
    return find_model(repository, "m")


@pytest.mark.parametrize(
    ("policy", "is_refused"),
    [("", True), ("version_policy { all { } }", False), ("version_policy { specific { versions: [ 1, 3 ] } }", False)],
)
def test_a_graph_keeps_the_version_that_it_asks_for(repository: Path, policy: str, is_refused: bool) -> None:
    """By default only the highest version is served: a new one would take version 3 away."""
    add_graph(repository, "pinned", 'model_name: "m" model_version: 3')
    model = with_policy(repository, policy)
    uses = graphs_that_call(repository, "m")
    assert GraphUse("pinned", frozenset({3})) in uses
    if is_refused:
        with pytest.raises(InvalidArgumentError, match="graph 'pinned' asks for version 3 of 'm'"):
            check_pinned(model, 4, uses)
    else:
        check_pinned(model, 4, uses)


def test_a_stage_has_the_version_and_what_the_graph_needs(repository: Path, tmp_path: Path) -> None:
    """As links; the model has its other files, one version, and its configuration with more parameters."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "model.onnx").write_bytes(b"new")
    model = find_model(repository, "m")
    plan = choose_graph("outer", model, graphs_that_call(repository, "m"))
    config = staged_config(model, {"a": "b"})
    staged = stage_version(tmp_path / "stage", model, files, config, plan=plan)
    assert ["inner", "outer"] == sorted(os.listdir(staged / "graphs"))
    assert ["m", "other"] == sorted(os.listdir(staged / "model"))
    assert ["3", "config.pbtxt", "labels.txt"] == sorted(os.listdir(staged / "model/m"))
    assert b"new" == (staged / "model/m/3/model.onnx").read_bytes()
    written, _ = parse((staged / "model/m/config.pbtxt").read_text(), ModelConfig(), file="")
    assert ([3], "b") == (list(written.version_policy.specific.versions), written.parameters["a"].string_value)
    assert not (staged / "preprocess").exists()


def test_a_graph_with_code_has_every_model_beside_it(repository: Path, tmp_path: Path) -> None:
    """Since code may call any."""
    add_model(repository, "model/code", file="model.py")
    add_graph(repository, "coded", 'model_name: "m"', 'model_name: "code"')
    model = find_model(repository, "m")
    plan = choose_graph("coded", model, graphs_that_call(repository, "m"))
    staged = stage_version(tmp_path / "stage", model, model.source.folder, staged_config(model, {}), plan=plan)
    assert ["code", "m", "other", "unused"] == sorted(os.listdir(staged / "model"))
    assert ["before"] == os.listdir(staged / "preprocess")


def test_models_side_by_side_are_staged_so(tmp_path: Path) -> None:
    """As Triton Inference Server has them."""
    add_model(tmp_path / "repository", "m")
    model = find_model(tmp_path / "repository", "m")
    staged = stage_version(tmp_path / "stage", model, model.source.folder, staged_config(model, {}), plan=None)
    assert "" == model.service
    assert ["1", "config.pbtxt"] == sorted(os.listdir(staged / "m"))


def test_a_model_alone_neither_waits_nor_remembers() -> None:
    """One instance, no cache, no delay, no warm-up; the rest is as it is served."""
    config, _ = parse(
        'max_batch_size: 4 instance_group { count: 3 } response_cache { enable: true } model_warmup { name: "w" } '
        'dynamic_batching { max_queue_delay_microseconds: 900 priority_levels: 2 } parameters { key: "a" value { } }',
        ModelConfig(),
        file="",
    )
    bare = alone(config)
    assert (1, 0, 2) == (
        bare.instance_group[0].count,
        bare.dynamic_batching.max_queue_delay_microseconds,
        bare.dynamic_batching.priority_levels,
    )
    assert not bare.response_cache.enable
    assert not bare.model_warmup
    assert "a" in bare.parameters


def test_weights_beside_the_model_file_are_its_files(tmp_path: Path) -> None:
    """A torch program has one file."""
    folder = add_model(tmp_path / "repository", "m", file="model.pt2")
    (folder / "config.pbtxt").write_text(f'name: "m"\nbackend: "pytorch"\n{TENSORS}')
    source = find_model(tmp_path / "repository", "m").source
    assert [source.file] == model_files(source)
