# mypy: disable-error-code="attr-defined,index,valid-type"
"""``@weft.model``: the configuration, the folder, errors on the user's line, and what the written model does."""

import traceback
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import weft
import weft.testing
from weft import BOOL, FP32, INT64, STRING, GraphError, Outputs, Tensor
from weft.base.errors import InternalError
from weft_protos.model_config_pb2 import ModelConfig


@weft.model(
    max_batch_size=64,
    batching=weft.Batching(delay_us=500, preferred_batch_size=[8, 16]),
    execution="inline",
    instances=2,
    parameters={"depth": 3, "is_fast": True, "note": "x"},
    response_cache={"enable": True},
)
def top2(PROBS: Tensor[FP32, 10]) -> Outputs(FIRST=Tensor[INT64, 2]):
    """The two best."""
    return {"FIRST": (-PROBS).argsort(axis=1)[:, :2]}


@weft.model(max_batch_size=8, batching={})
def checked(X: Tensor[FP32, 2], HOW: Tensor[STRING, 1] = None) -> Outputs(Y=Tensor[FP32, 2], N=Tensor[INT64, 1]):
    how = "" if HOW is None else HOW[0, 0].decode()
    if (X < 0).any():
        raise ValueError("negative")
    rows = np.array([[len(X)]] * len(X))
    return {
        "": {"Y": X, "N": rows},
        "list": [X, rows],
        "name": {"Y": X, "M": rows, "N": rows},
        "missing": {"Y": X},
        "dtype": {"Y": X.astype(float), "N": rows},
        "shape": {"Y": X[:, :1], "N": rows},
        "rows": {"Y": X[:0], "N": rows},
        "lists": {"Y": X, "N": rows.tolist()},
    }[how]


@weft.model
def count(LIMIT: Tensor[INT64, 1]) -> Outputs(I=Tensor[INT64, 1], WORD=Tensor[STRING, 1].options(optional=True)):
    for i in range(LIMIT[0]):
        if i == 4:
            raise RuntimeError("four")
        yield {"I": np.array([i]), "WORD": ["even"] if i % 2 == 0 else None}


@weft.model(max_batch_size=4, batching={})
class Total:
    def __init__(self):
        self.total = 0.0

    def __call__(self, X: Tensor[FP32, 1]) -> Outputs(TOTAL=Tensor[FP32, 1], IS_BIG=Tensor[BOOL, 1]):
        self.total += float(X.sum())
        return {"TOTAL": np.full_like(X, self.total), "IS_BIG": np.full(X.shape, self.total > 5)}


def test_a_configuration_from_keywords():
    """Keywords are fields of ModelConfig, with short forms for some; parameters become texts."""
    expected = ModelConfig()
    text_format.Parse(
        """
        name: "top2" backend: "python" max_batch_size: 64
        input { name: "PROBS" data_type: TYPE_FP32 dims: 10 }
        output { name: "FIRST" data_type: TYPE_INT64 dims: 2 }
        instance_group { count: 2 }
        dynamic_batching { preferred_batch_size: [8, 16] max_queue_delay_microseconds: 500 }
        parameters { key: "EXECUTION" value { string_value: "inline" } }
        parameters { key: "depth" value { string_value: "3" } }
        parameters { key: "is_fast" value { string_value: "true" } }
        parameters { key: "note" value { string_value: "x" } }
        response_cache { enable: true }
        """,
        expected,
    )
    assert expected == top2.config
    assert ("top2", 64, ("PROBS",)) == (
        top2.name,
        top2.signature.max_batch_size,
        tuple(s.name for s in top2.signature.inputs),
    )


def test_optional_tensors_and_streams_in_the_configuration():
    """None as default is an optional input, an optional output is a parameter, and a generator is decoupled."""
    assert [False, True] == [one.optional for one in checked.config.input]
    assert "WORD" == count.config.parameters["optional_outputs"].string_value
    assert count.signature.is_decoupled
    assert not checked.config.HasField("model_transaction_policy")


def test_called_it_is_the_function():
    """A model is called as the function that it is made of, with its name and docstring; a class is made once."""
    assert [[9, 8]] == top2(np.arange(10.0)[None])["FIRST"].tolist()
    assert ("top2", "The two best.") == (top2.__name__, top2.__doc__)
    assert [0, 1] == [one["I"][0] for one in count(np.array([2]))]
    total = weft.model(Total.__wrapped__)
    assert [1, 3] == [total(np.array([[x]], np.float32))["TOTAL"][0, 0] for x in (1, 2)]


def test_a_folder_is_written_again_alike(tmp_path):
    """Writing gives config.pbtxt and model.py, the same bytes each time, which are the text of the model."""
    first = {path: path.read_bytes() for path in top2.write(tmp_path, version=3)}
    assert [tmp_path / "top2" / "config.pbtxt", tmp_path / "top2" / "3" / "model.py"] == list(first)
    assert first == {path: path.read_bytes() for path in top2.write(tmp_path, version=3)}
    assert top2.text == first[tmp_path / "top2" / "3" / "model.py"].decode()
    assert top2.config == text_format.Parse(first[tmp_path / "top2" / "config.pbtxt"], ModelConfig())


@pytest.mark.parametrize(
    ("given", "to", "place"),
    [
        ("", "new", "new/model"),
        ("old/model/a/1", "old", "old/model"),
        ("flat/a/1", "flat", "flat"),
        ("", "x/model", "x/model"),
    ],
)
def test_where_models_are_written(tmp_path, given, to, place):
    """``weft.write`` puts a model where the other models of the repository are."""
    (tmp_path / given).mkdir(parents=True, exist_ok=True)
    if given:
        (tmp_path / given).with_name("config.pbtxt").write_text('backend: "python"')
    found = {path.relative_to(tmp_path / place) for path in weft.write(top2, to=tmp_path / to)}
    assert {Path("top2/config.pbtxt"), Path("top2/1/model.py")} == found
    assert not weft.write(top2, to=tmp_path / to)


def test_requests_of_a_batch_are_one_call(weft_model):
    """Requests that come together are one call of the function, and each gets its rows."""
    model = weft_model(checked)
    answers = model.batch([{"X": [[1, 2], [3, 4]]}, {"X": [[5, 6]]}])
    assert [[[3], [3]], [[3]]] == [one.N.tolist() for one in answers]
    assert [[[1, 2], [3, 4]], [[5, 6]]] == [one.Y.tolist() for one in answers]


def test_a_bad_request_fails_alone(weft_model, caplog):
    """Where the function raises for a batch, each request is tried alone: only the bad one fails."""
    model = weft_model(checked)
    good, bad, lists = model.batch([{"X": [[1, 2]]}, {"X": [[-1, 2]]}, {"X": [[1, 2]], "HOW": ["lists"]}])
    assert [[1]] == good.N.tolist() == lists.N.tolist()
    assert "checked raised ValueError; the log has more" in bad.message
    assert "ValueError: negative" in caplog.text
    with pytest.raises(ValueError, match="negative") as raised:
        model(X=[[-1, 2]])
    assert "checked" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("list", "checked must return a dict of outputs, got list"),
        ("name", "checked returned 'M'; its outputs are Y, N"),
        ("missing", "checked did not return output 'N'"),
        ("dtype", "output 'Y' of checked is float64, but must be float32; use .astype('float32')"),
        ("shape", "output 'Y' of checked has shape [1, 1], but must have [1, 2]"),
        ("rows", "output 'Y' of checked has shape [0, 2], but must have [1, 2]"),
    ],
)
def test_a_wrong_return_names_the_output(weft_model, how, says):
    """Name, datatype and shape of what a function returns are checked, and the error that clients get says which."""
    with pytest.raises(InternalError) as raised:
        weft_model(checked)(X=[[1, 2]], HOW=[[how]])
    assert f"TritonModelException: {says} (" in raised.value.message


def test_a_generator_is_a_stream(weft_model):
    """What a generator yields are responses, an empty one tells the end; what it raises ends the stream."""
    model = weft_model(count)
    responses = model(LIMIT=[3])
    assert [0, 1, 2] == [one.I[0] for one in responses[:3]]
    assert [b"even"] == responses[0].WORD.tolist()
    assert "WORD" not in responses[1]
    assert [False, False, False, True] == [one.is_final for one in responses]
    call, numbers = model.start({"LIMIT": [9]}), []
    with pytest.raises(InternalError, match="count raised RuntimeError; the log has more"):
        numbers.extend(one.I[0] for one in call)
    assert [0, 1, 2, 3] == numbers


def test_a_class_keeps_its_state(weft_model):
    """A class is made once for an instance, and a batch of it is never called twice."""
    model = weft_model(Total)
    assert [[1]] == model(X=[[1]]).TOTAL.tolist()
    assert [[[6]], [[6]]] == [one.TOTAL.tolist() for one in model.batch([{"X": [[2]]}, {"X": [[3]]}])]
    assert [[True]] == model(X=[[0]]).IS_BIG.tolist()


def test_in_a_graph_it_is_a_step():
    """Called while a graph is traced, a model is a step that calls it by name."""

    @weft.graph(max_batch_size=8)
    def best(PROBS: Tensor[FP32, 10]) -> Outputs(FIRST=Tensor[INT64, 2]):
        return top2(PROBS)

    assert "top2" == best.message.node[0].sequence.step[0].model_name


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: weft.model(max_batchsize=3), "has no field 'max_batchsize'; did you mean 'max_batch_size'?"),
        (lambda: weft.model(input=[]), "has no field 'input'"),
        (lambda: weft.Batching(delay=3), "has no field 'delay'"),
        (lambda: weft.model(max_batch_size="many")(top2.__wrapped__), "'many'"),
        (lambda: weft.model(execution="inlined")(top2.__wrapped__), "must be one of process, thread, inline"),
        (lambda: weft.model(instances=[{"count": 1, "kind": "KIND_TPU"}])(top2.__wrapped__), "KIND_TPU"),
        (lambda: weft.model(3), "takes a function with a name, or a class with __call__, got int"),
        (lambda: weft.model(type("Empty", (), {})), "takes a function with a name, or a class with __call__, got type"),
    ],
)
def test_a_fault_is_on_its_line(make, says):
    """A wrong keyword or value raises where it stands: the traceback ends on that line of the user's file."""
    with pytest.raises(GraphError) as raised:
        make()
    assert says in str(raised.value)
    assert __file__ == traceback.extract_tb(raised.value.__traceback__)[-1].filename
    assert (__file__, make.__code__.co_firstlineno) == (
        raised.value.diagnostics[0].file,
        raised.value.diagnostics[0].line,
    )


def test_a_missing_type_names_the_parameter():
    """Every parameter and the answer need types, and a coroutine is no model."""

    def untyped(X, Y: Tensor[FP32, 1]) -> Outputs(Z=Tensor[FP32, 1]): ...

    def no_answer(X: Tensor[FP32, 1]): ...

    async def waits(X: Tensor[FP32, 1]) -> Outputs(Z=Tensor[FP32, 1]): ...

    for function, says in (
        (untyped, "needs a type for X"),
        (no_answer, "needs -> weft.Outputs"),
        (waits, "no coroutine"),
    ):
        with pytest.raises(GraphError, match=says) as raised:
            weft.model(function)
        assert function.__code__.co_firstlineno == raised.value.diagnostics[0].line
