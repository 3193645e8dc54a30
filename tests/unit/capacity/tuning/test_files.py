"""Which files a graph needs, a repository for a trial, and the pick written into the user's."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError
from weft.capacity.tuning import graph_models
from weft.capacity.tuning.graph_models import TunedGraph, read_graph, stage_graph, write_copy, write_in_place
from weft.capacity.tuning.measurement import parse_limit
from weft.capacity.tuning.space import Cost, Machine, SearchSpace, make_space
from weft.capacity.tuning.tune import TuneOptions, tune
from weft.jobs.atomic_files import replace_file
from weft.tools.offline import examine

TENSORS = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
STEP = 'step {{ name: "{0}" model_name: "{0}" {1} }}'


def write_model(folder: Path, more: str = "", *, backend: str = "onnxruntime", batch: int = 8) -> None:
    """A model whose configuration alone is real."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"weights")
    head = f'# Of {folder.name}.\nname: "{folder.name}"\nbackend: "{backend}"\nmax_batch_size: {batch}'
    (folder / "config.pbtxt").write_text(f"{head}{TENSORS}{more}\n")


def write_graph(folder: Path, *steps: str, batch: int = 4) -> None:
    """A sequence of steps."""
    (folder / "1").mkdir(parents=True)
    body = f'name: "{folder.name}"\nplatform: "graph"\nmax_batch_size: {batch}{TENSORS}'
    text = f'{body}node {{ name: "root" sequence {{ {" ".join(steps)} }} }}'
    (folder / "1" / "graph.pbtxt").write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Graphs over some of the models."""
    root = tmp_path / "repository"
    write_model(root / "model" / "first", "dynamic_batching { }")
    write_model(root / "model" / "second", batch=64)
    write_model(root / "model" / "unused")
    write_graph(
        root / "graphs" / "both",
        STEP.format("first", 'output_map { key: "Y" value: "middle" }'),
        STEP.format("second", 'input_map { key: "X" value: "middle" }'),
    )
    write_graph(root / "graphs" / "large", STEP.format("second", ""), batch=16)
    return root


def space_of(graph: TunedGraph) -> SearchSpace:
    """On a machine of four cores."""
    return make_space(list(graph.models.values()), Machine(4, 50.0))


def contents(folder: Path) -> Mapping[str, bytes]:
    """Content of each file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_graph_needs_the_models_it_calls(root: Path) -> None:
    """And no other."""
    graph = read_graph("both", root)
    assert sorted(map(str, graph.folders)) == ["graphs/both", "model/first", "model/second"]
    assert {name: model.min_batch_size for name, model in graph.models.items()} == {"first": 4, "second": 16}


def test_batches_never_get_smaller_than_a_graph_may_send(root: Path) -> None:
    """Any graph of the repository: `large` sends 16 rows to the model that `both` sends 4."""
    settings = space_of(read_graph("both", root)).settings
    assert settings["second.max_batch_size"].choices == (16, 32, 64, 128, 256)
    assert settings["first.max_batch_size"].choices == (4, 8, 16, 32)
    assert space_of(read_graph("second", root)).settings["second.max_batch_size"].choices == (64, 128, 256)


def test_model_that_calls_others_needs_all(root: Path) -> None:
    """Which ones only its code knows."""
    write_model(root / "model" / "caller", backend="python")
    (root / "model" / "caller" / "1" / "model.py").write_text("pb_utils.InferenceRequest(model_name=some())")
    assert len(read_graph("caller", root).folders) == 6


@pytest.mark.parametrize("name", ["bot", "both/2", "none"])
def test_unknown_graphs_are_told(root: Path, name: str) -> None:
    """With the nearest name."""
    with pytest.raises(NotFoundError, match=r"has no graph or model|has no version"):
        read_graph(name, root)
    with pytest.raises(NotFoundError, match="--repository DIR names the model repository"):
        read_graph(name, root / "nowhere")


def test_staged_repository_links_and_differs_where_it_should(root: Path, tmp_path: Path) -> None:
    """The weights are the user's file; a configuration that is tried is another; the user's stay."""
    before, graph = contents(root), read_graph("both", root)
    space = space_of(graph)
    texts = space.texts({**space.shipped, "first.instances": 4})
    for _ in range(2):
        staged = stage_graph(graph, texts, tmp_path / "staged")
        assert (staged / "model/first/1").resolve() == root / "model/first/1"
        assert "instance_group { count: 4 }" in (staged / "model/first/config.pbtxt").read_text()
        assert (staged / "model/second/config.pbtxt").is_symlink()
        assert contents(staged).keys() | {"graphs/large/1/graph.pbtxt"} <= contents(root).keys()
    assert contents(root) == before


def test_settings_of_a_model_are_its_own(root: Path) -> None:
    """Stateful, decoupled and language models are left alone; a limit of 1 ms allows no delay of 5 ms."""
    write_model(root / "model" / "stateful", "sequence_batching { }")
    write_model(root / "model" / "stream", "model_transaction_policy { decoupled: true }")
    write_model(root / "model" / "writer", backend="llm")
    for name in ("stateful", "stream", "writer"):
        assert list(space_of(read_graph(name, root)).settings) == ["in_process"]
    space = make_space(list(read_graph("first", root).models.values()), Machine(4, 1.0))
    assert space.settings["first.queue_delay_us"].choices == ("off", 0, 100, 250)
    assert space.settings["first.instances"].choices == (1, 2, 4)


def test_every_choice_can_be_written_and_served(root: Path) -> None:
    """Each value of each setting gives a configuration that the checker takes, alone and beside batching."""
    levels = "preferred_batch_size: [ 2 ] priority_levels: 2 default_priority_level: 1"
    write_model(root / "model" / "queued", f"dynamic_batching {{ {levels} }}")
    buckets = """
        parameters { key: "batch_buckets" value { string_value: "8,16,32" } }
        parameters { key: "batch_buckets_pad" value { string_value: "X=0" } }
        dynamic_batching { }"""
    write_model(root / "model" / "padded", buckets)
    config = root / "model" / "padded" / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ 1 ]", "dims: [ -1 ]"))
    for name in ("first", "second", "queued", "padded"):
        graph = read_graph(name, root)
        space = space_of(graph)
        for key, setting in space.settings.items():
            for value in setting.choices:
                for text in space.texts({**space.shipped, key: value}).values():
                    path = graph.models[name].folder / "config.pbtxt"
                    path.write_text(text)
                    assert not examine(path)[1], (key, value, text)
                    path.write_text(graph.models[name].text)


def test_settings_without_effect_are_one_configuration(root: Path) -> None:
    """Preferred sizes of a model that does not batch, instances of one that runs inline."""
    space = space_of(read_graph("first", root))
    off = {**space.shipped, "first.queue_delay_us": "off", "first.execution": "inline"}
    same = {**off, "first.preferred_batch_size": "4", "first.instances": 4}
    assert space.canonical(off) == space.canonical(same)
    assert space.texts(off) == space.texts(same)


def test_steps_begin_with_what_most_often_helps(root: Path) -> None:
    """One process, models on the event loop, cheap ones first, then settings of the dearest model."""
    space = space_of(read_graph("both", root))
    costs = {"first": Cost(100.0, 0.01), "second": Cost(30_000.0, 0.99)}
    steps = [space.changes(step) for step in space.steps(space.shipped, costs)]
    assert steps[0] == {"in_process": ("none", "model")}
    assert steps[1] == {"in_process": ("none", "model"), "first.execution": ("thread", "inline")}
    assert steps[2] == steps[1] | {"second.execution": ("thread", "inline")}
    assert steps[3] == {"first.instances": (1, 2), "second.instances": (1, 2)}
    single = [key for step in steps for key in step if len(step) == 1]
    assert single.index("second.instances") < single.index("first.instances")


def pick(graph: TunedGraph) -> Mapping[str, str]:
    """New configurations of both models."""
    space = space_of(graph)
    return space.texts({**space.shipped, "first.instances": 2, "second.instances": 2})


def test_a_repository_that_cannot_be_written_is_told_before_the_search(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the way to have the pick all the same; no study is begun."""
    locked = (root / "model" / "second").resolve()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != locked)  # root may write anything
    options = TuneOptions("both", (parse_limit("p99=50ms"),), tmp_path / "study", repository=root, write=True)
    with pytest.raises(PermissionDeniedError, match=f"'{locked}' cannot be written; --output DIR writes a copy"):
        tune(options)
    assert not (tmp_path / "study").exists()


def test_write_keeps_what_was_there(root: Path) -> None:
    """Beside the file, byte for byte; a second time too, without losing the first."""
    first = (root / "model/first/config.pbtxt").read_text()
    for _ in range(2):
        graph = read_graph("both", root)
        before = {name: model.text for name, model in graph.models.items()}
        texts = {name: f"# {text}" for name, text in pick(graph).items()} if _ == 0 else {"first": first + "\n"}
        write_in_place(graph, texts)
        for name, text in texts.items():
            assert (root / f"model/{name}/config.pbtxt").read_text() == text
            kept = [path.read_text() for path in (root / f"model/{name}").glob("config.pbtxt.before-tune*")]
            assert before[name] in kept
    kept = [path.read_text() for path in (root / "model/first").glob("config.pbtxt.before-tune*")]
    assert first in kept
    assert len(kept) == 2


def test_write_is_all_or_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was changed meanwhile, or cannot be written, leaves all of them as they were."""
    graph = read_graph("both", root)
    second = root / "model/second/config.pbtxt"
    second.write_text(second.read_text() + "# changed\n")
    before = contents(root)
    with pytest.raises(InvalidArgumentError, match="was changed since the search began; nothing was written"):
        write_in_place(graph, pick(graph))
    assert contents(root) == before

    graph = read_graph("both", root)

    def fails_at_second(path: Path, content: bytes) -> None:
        if path == second and content != graph.models["second"].text.encode():
            raise OSError(28, "No space left on device", str(path))
        replace_file(path, content)

    monkeypatch.setattr(graph_models, "replace_file", fails_at_second)
    with pytest.raises(OSError, match="No space left"):
        write_in_place(graph, pick(graph))
    after = {name: content for name, content in contents(root).items() if "before-tune" not in name}
    assert after == before


def test_copy_is_whole_and_apart(root: Path, tmp_path: Path) -> None:
    """Every file, also of models that the graph does not call, as files of its own; what is there is not replaced."""
    graph, before = read_graph("both", root), contents(root)
    texts = pick(graph)
    written = write_copy(graph, texts, tmp_path / "new" / "copy")
    copied = contents(tmp_path / "new" / "copy")
    assert copied.keys() == before.keys()
    assert {str(path.relative_to(tmp_path / "new/copy")) for path in written} == {
        name for name in copied if copied[name] != before[name]
    }
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))
    for output in (tmp_path / "new" / "copy", root / "inside"):
        with pytest.raises(InvalidArgumentError, match=r"exists; name a new folder|is inside the repository"):
            write_copy(graph, texts, output)
    assert contents(root) == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy"]
