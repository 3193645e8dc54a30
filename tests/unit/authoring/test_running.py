"""Graphs run in this process: fakes, real models, errors, streams, loops and threads."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.repositories import NUMBER_BATCHES, write_graph, write_model

import weft
from weft import FP32, Graph, Tensor, fake
from weft.base.errors import InvalidArgumentError, NotFoundError, RemoteError, UnavailableError, WeftError
from weft.base.text.pbtxt import parse
from weft.tools.offline import OfflineCatalog, graphs_of
from weft_protos import graph_pb2

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", {answer})]))
        return answers
"""
GRAPH = """
name: "{name}"
platform: "graph"
max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }}
node {{ name: "root" sequence {{ {steps} }} }}
"""
TWICE = (
    'step { model_name: "double" output_map { key: "Y" value: "twice" } } '
    'step { model_name: "increment" input_map { key: "X" value: "twice" } }'
)
WITH_FALLBACK = 'step { model_name: "double" fallback { model_name: "increment" } }'
CALL = (
    'pb_utils.InferenceRequest(model_name="increment", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x)])'
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Y = 2 X, Y = X + 1, one that calls the second, and one that cannot be loaded."""
    answers = {"double": "2 * x", "increment": "x + 1", "calls": f"{CALL}.exec().output_tensors()[0].as_numpy()"}
    for name, answer in answers.items():
        write_model(tmp_path / "model", name, MODEL.format(initialize="pass", answer=answer), NUMBER_BATCHES)
    broken = MODEL.format(initialize='raise ValueError("no weights")', answer="x")
    write_model(tmp_path / "model", "broken", broken, NUMBER_BATCHES)
    (tmp_path / "graphs").mkdir()
    return tmp_path


def graph_of(text: str, repository: Path) -> Graph:
    """A graph by its text, with the models and graphs of the repository."""
    graph = Graph(parse(text, graph_pb2.Graph(), file="graph.pbtxt")[0])
    graph.catalog, graph.graphs = OfflineCatalog(repository), graphs_of(repository)
    return graph


def graph(repository: Path, steps: str = TWICE, name: str = "sums") -> Graph:
    """A graph of these steps."""
    return graph_of(GRAPH.format(steps=steps, name=name), repository)


def test_models_that_no_fake_stands_for_are_the_real_ones(repository: Path) -> None:
    """The answer, the path and the times are those of the models in the repository."""
    answer = graph(repository).run({"X": [[1.0], [4.0]]})
    assert answer.Y.tolist() == answer["Y"].tolist() == [[3.0], [9.0]]
    assert answer.path == "root.double;increment"
    assert set(answer.times_ms) == {"root/double", "root/increment"}
    assert [step["model"] for step in answer.trace] == ["double", "increment"]


def test_a_constant_is_repeated_for_each_row_and_calls_are_kept(repository: Path) -> None:
    """A fake takes the model's place, answers each row, and keeps the inputs of its calls."""
    double = fake(Y=[10.0])
    assert graph(repository).run({"X": [1.0, 2.0, 3.0]}, models={"double": double}).Y.tolist() == [[11]] * 3
    assert [call["X"].tolist() for call in double.calls] == [[[1], [2], [3]]]


def test_only_what_the_graph_reaches_is_loaded(repository: Path) -> None:
    """A model that fails to load stops a graph that calls it, with the model's reason, and no other graph."""
    assert graph(repository, 'step { model_name: "double" }').run({"X": [1.0]}).Y.item() == 2
    with pytest.raises(WeftError, match="no weights"):
        graph(repository, 'step { model_name: "broken" }').run({"X": [1.0]})
    broken = fake(lambda X: {"Y": -X})
    assert (
        graph(repository, 'step { model_name: "broken" }').run({"X": [1.0]}, models={"broken": broken}).Y.item() == -1
    )


def test_a_model_that_only_models_call_is_loaded_when_it_is_called(repository: Path) -> None:
    """A Python model reaches models that no graph names, and fakes of them."""
    calls = graph(repository, 'step { model_name: "calls" }')
    assert calls.run({"X": [1.0]}).Y.item() == 2
    assert calls.run({"X": [1.0]}, models={"increment": fake(Y=7)}).Y.item() == 7


async def _later(X: np.ndarray) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"Y": X * 5}


@pytest.mark.parametrize("function", [lambda X: {"Y": X * 5}, _later, lambda *, X: _later(X)])
def test_a_function_answers_from_the_inputs(repository: Path, function: Any) -> None:
    """Inputs are numpy arrays under their names; the function may be async."""
    answer = graph(repository).run({"X": np.ones((2, 1), np.float32)}, models={"double": fake(function)})
    assert answer.Y.tolist() == [[6], [6]]


@pytest.mark.parametrize("error", ["UNAVAILABLE", "ABORTED", UnavailableError, ValueError("a bug")])
def test_a_fake_that_fails_makes_the_step_fail(repository: Path, error: Any) -> None:
    """The graph goes on with a fallback; without one the error names step and status, and has the path."""
    models = {"double": fake(error)}
    answer = graph(repository, WITH_FALLBACK).run({"X": [1.0]}, models=models)
    assert (answer.Y.item(), answer.path) == (2, "root.double!>increment")
    with pytest.raises(RemoteError, match="sums/1: root/double -> double@1") as failed:
        graph(repository).run({"X": [1.0]}, models=models)
    code = {str: error, type: "UNAVAILABLE", ValueError: "INTERNAL"}[type(error)]
    assert (failed.value.code, failed.value.path) == (code, "root.double!")


def test_what_a_fake_raises_by_mistake_is_raised_although_the_graph_has_a_fallback(repository: Path) -> None:
    """A failed assertion in a fake is the test's failure, not the model's; a WeftError is the model's."""

    def check(X: np.ndarray) -> dict[str, Any]:
        assert X.item() == 2, "not two"
        return {"Y": X}

    with pytest.raises(AssertionError, match="not two"):
        graph(repository, WITH_FALLBACK).run({"X": [1.0]}, models={"double": fake(check)})


WRONG_FAKES = {
    "Z=1": (fake(Z=1.0), "gives 'Z', which is no output of the model; its outputs are Y"),
    "nothing": (fake(), r"does not give output 'Y' \(FP32 \[1\]\); add it"),
    "text": (fake(Y="one"), "value of output 'Y' does not fit FP32"),
    "shape": (fake(Y=[1.0, 2.0]), r"shape \[2\]; give \[1\], which is repeated for each row, or \[1, 1\]"),
    "complex": (
        fake(lambda X: {"Y": X.astype(np.complex64)}),
        "'Y' as complex64, and the model gives FP32; convert it",
    ),
    "bytes": (fake(Y=np.array([b"x"], object)), "'Y' as object, and the model gives FP32"),
    "rows": (fake(lambda X: {"Y": np.ones((3, 1))}), r"shape \[3, 1\]; give \[1\]"),
    "a list": (fake(lambda X: [1]), "gives list; give a dict with an array for each output"),
    "several": (fake(lambda X: iter([{"Y": 1}, {"Y": 2}])), "gives 2 responses where one is asked for; give one"),
    "none": (fake(lambda X: iter([])), "gives 0 responses where one"),
}


@pytest.mark.parametrize("case", WRONG_FAKES)
def test_a_fake_that_gives_what_its_model_does_not_is_refused(repository: Path, case: str) -> None:
    """The message names the model, the output, what was given and what the model gives."""
    wrong, message = WRONG_FAKES[case]
    with pytest.raises(ValueError, match=f"the fake of model 'double' .*{message}"):
        graph(repository, WITH_FALLBACK).run({"X": [1.0]}, models={"double": wrong})


def test_fakes_of_nothing_are_refused(repository: Path) -> None:
    """An unknown model has the nearest name in its error; what is no fake is named."""
    with pytest.raises(NotFoundError, match="no model 'doubel' that a fake could stand for; did you mean 'double'"):
        graph(repository).run({"X": [1.0]}, models={"doubel": fake(Y=1)})
    with pytest.raises(InvalidArgumentError, match=r"models\['double'\] is of type dict; give weft.fake"):
        graph(repository).run({"X": [1.0]}, models={"double": {"Y": 1}})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="no such error status; did you mean 'UNAVAILABLE'"):
        fake("UNAVAILABEL")
    with pytest.raises(InvalidArgumentError, match="give constants, or one function, exception or name"):
        fake(print, Y=1)


BAD_REQUESTS: dict[str, Any] = {
    "missing": ({}, {}, "missing required input"),
    "unknown": ({"X": [1.0], "Z": [1]}, {}, "unexpected inference input 'Z' for model 'sums'"),
    "type": ({"X": np.ones((1, 1))}, {}, "data-type is 'FP64', but model 'sums' expects 'FP32'"),
    "value": ({"X": ["one"]}, {}, "value of input 'X' does not fit FP32"),
    "shape": ({"X": [[1.0, 2.0]]}, {}, "unexpected shape for input 'X' for model 'sums'"),
    "rows": ({"X": [1.0] * 9}, {}, "batch-size must be <= 8 for 'sums', got 9"),
    "empty": ({"X": []}, {}, "unexpected shape for input 'X'"),
    "output": ({"X": [1.0]}, {"outputs": ["Q"]}, "unexpected inference output 'Q' for model 'sums'"),
    "priority": ({"X": [1.0]}, {"parameters": {"priority": -1}}, "parameter 'priority' must be a whole number"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_as_by_a_server(repository: Path, case: str) -> None:
    """The error is INVALID_ARGUMENT and says what is wrong; no model is called."""
    inputs, options, message = BAD_REQUESTS[case]
    double = fake(Y=1)
    with pytest.raises(weft.errors.InvalidArgumentError, match=message) as refused:
        graph(repository).run(inputs, models={"double": double}, **options)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert not double.calls


def test_a_deadline_cancels_the_fakes_in_flight(repository: Path) -> None:
    """A fake that takes longer than the request may ends with DEADLINE_EXCEEDED, and is cancelled."""
    ended = []

    async def forever(X: np.ndarray) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    for slow in (fake(Y=1, delay_ms=60_000), fake(forever)):
        with pytest.raises(WeftError, match=r"did not answer within the \d+ ms") as late:
            graph(repository).run({"X": [1.0]}, models={"double": slow}, timeout_ms=20)
        assert late.value.code == "DEADLINE_EXCEEDED"
    assert ended == [True]


def test_headers_parameters_and_outputs_reach_the_graph(repository: Path) -> None:
    """Conditions see headers, whose names are in lower case, and parameters; the answer has the outputs asked for."""
    steps = (
        'step { model_name: "double" when: \'headers["x-fast"] == "no" && parameters["n"] == 1\' dependency: SOFT '
        'default { output: "Y" number: 9 } }'
    )
    with graph(repository, steps).loaded() as loaded:
        yes = loaded.run({"X": [1.0]}, headers={"X-Fast": "no"}, parameters={"n": 1}, outputs=["Y"])
        no = loaded.run({"X": [1.0]}, headers={"x-fast": "yes"}, parameters={"n": 1})
    assert ([*yes], yes.Y.item(), no.Y.item()) == (["Y"], 2, 9)
    with pytest.raises(RuntimeError, match="not loaded: run it in its `with` block"):
        loaded.run({"X": [1.0]})
    with pytest.raises(TypeError, match="unexpected keyword argument 'timeout'"):
        graph(repository).run({"X": [1.0]}, timeout=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="inputs are a dict with a value for each input, got list"):
        graph(repository).run([1.0])  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no output 'Z'; it has Y"):
        yes.Z  # noqa: B018


STREAM = """
name: "counting"
platform: "graph"
input { name: "N" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
node { name: "root" sequence { step { model_name: "count" } } }
"""
COUNT = """
input { name: "N" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""


@pytest.fixture
def counting(tmp_path: Path) -> Graph:
    """A decoupled graph, over a model that has a configuration and no code."""
    write_model(tmp_path / "model", "count", "", COUNT)
    return graph_of(STREAM, tmp_path)


def _count(N: np.ndarray) -> Iterator[dict[str, Any]]:
    for number in range(N.item()):
        yield {"TEXT": f"number {number}"}


async def _count_later(N: np.ndarray) -> AsyncIterator[dict[str, Any]]:
    for one in _count(N):
        await asyncio.sleep(0)
        yield one


@pytest.mark.parametrize("function", [_count, _count_later])
def test_the_responses_of_a_decoupled_graph_are_an_iterator(counting: Graph, function: Any) -> None:
    """Each response of a generator comes by itself; path and times are known after the last."""
    answers = list(counting.stream({"N": 3}, models={"count": fake(function)}))
    assert [answer.TEXT.item() for answer in answers] == [b"number 0", b"number 1", b"number 2"]
    assert {answer.path for answer in answers} == {"root.count"}
    assert list(answers[0].times_ms) == ["root/count"]
    assert list(counting.stream({"N": [0]}, models={"count": fake(function)})) == []
    with pytest.raises(WeftError, match="doesn't support models with decoupled"):
        counting.run({"N": 1}, models={"count": fake(function)})


def test_closing_a_stream_cancels_it(counting: Graph) -> None:
    """A model that would go on for ever is cancelled when the caller has seen enough."""
    ended = []

    async def forever(N: np.ndarray) -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                await asyncio.sleep(0)
                yield {"TEXT": "more"}
        finally:
            ended.append(True)

    answers = counting.stream({"N": 1}, models={"count": fake(forever)})
    assert next(answers).TEXT.item() == b"more"
    answers.close()
    assert ended == [True]


async def test_a_graph_runs_where_an_event_loop_runs(repository: Path) -> None:
    """``run_async`` runs on this loop, so that fakes may use what belongs to it; ``run`` works by a thread."""
    release = asyncio.Event()

    async def wait(X: np.ndarray) -> dict[str, Any]:
        await release.wait()
        return {"Y": X}

    waiting = asyncio.create_task(graph(repository).run_async({"X": [1.0]}, models={"double": fake(wait)}))
    assert graph(repository).run({"X": [1.0]}).Y.item() == 3
    release.set()
    assert (await waiting).Y.item() == 2


async def test_cancelling_a_run_cancels_its_calls(repository: Path) -> None:
    """The fake in flight is cancelled, and nothing is left."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def forever(X: np.ndarray) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(graph(repository).run_async({"X": [1.0]}, models={"double": fake(forever)}))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_loaded_graph_answers_many_requests_and_keeps_what_it_counts(repository: Path) -> None:
    """The models are loaded once for a ``with`` block."""
    initialize = 'with open(args["model_repository"] + "/loads", "a") as file: file.write("x")'
    write_model(repository / "model", "once", MODEL.format(initialize=initialize, answer="x"), NUMBER_BATCHES)
    with graph(repository, 'step { model_name: "once" }').loaded() as loaded:
        assert [loaded.run({"X": [float(n)]}).Y.item() for n in range(3)] == [0, 1, 2]
    assert next(repository.glob("model/**/loads")).read_text() == "x"


def test_graphs_that_a_graph_calls_come_from_the_repository_or_from_python(repository: Path) -> None:
    """A step's graph is found beside the models; one made in Python goes before it."""
    write_graph(repository / "graphs", "inner", GRAPH.format(name="inner", steps='step { model_name: "double" }'))
    m = weft.models(repository)

    @weft.graph(max_batch_size=8)
    def outer(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return m.inner(X)

    assert outer.run({"X": [4.0]}).Y.item() == 8
    inner = graph(repository, 'step { model_name: "increment" }', "inner")

    @weft.graph(max_batch_size=8)
    def other(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return inner(X)

    assert other.run({"X": [4.0]}).Y.item() == 5


def test_a_model_made_in_python_is_run_as_it_would_be_served(repository: Path) -> None:
    """It is written and loaded; another in Python, or a fake, may stand for it by its name."""

    @weft.model(max_batch_size=8, execution="thread")
    def negate(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return {"Y": -X}

    @weft.graph(max_batch_size=8)
    def negated(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return negate(weft.models(repository).double(X).Y)

    @weft.model(name="negate", max_batch_size=8, execution="thread")
    def other(X: Tensor[FP32, 1]) -> weft.Outputs(Y=Tensor[FP32, 1]):  # type: ignore[valid-type]
        return {"Y": -X - 1}

    assert negated.run({"X": [4.0]}).Y.item() == -8
    assert negated.run({"X": [4.0]}, {"negate": other}).Y.item() == -9
    assert negated.run({"X": [4.0]}, {"negate": fake(Y=3)}).Y.item() == 3


def test_with_a_lock_alone_every_model_is_a_fake(counting: Graph) -> None:
    """The signatures come from the graph's catalog; a model without a fake is unknown."""
    counting.catalog.repository = None  # type: ignore[union-attr,attr-defined]
    assert [one.TEXT.item() for one in counting.stream({"N": 1}, {"count": fake(_count)})] == [b"number 0"]
    with pytest.raises(UnavailableError, match="unknown model 'count'"):
        list(counting.stream({"N": 1}))
