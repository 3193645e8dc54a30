"""``weft.testing.model``: a ``model.py`` in this process: batches, streams, calls of others, cancellation, errors."""

import os
import textwrap
import threading
import traceback

import numpy as np
import pytest

import weft
import weft.testing
from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError
from weft.testing.in_process import TestedModel

CONFIG = """
backend: "python" max_batch_size: 8 dynamic_batching { }
input { name: "X" data_type: TYPE_FP32 dims: 2 } output { name: "Y" data_type: TYPE_FP32 dims: 2 }
"""


@pytest.fixture
def made(tmp_path, weft_model):
    """Load a model of the body of ``execute``, or of a whole ``model.py``."""

    def make(text: str, file: str = CONFIG, **options) -> TestedModel:
        text = textwrap.dedent(text)
        if "class TritonPythonModel" not in text:
            text = f"class TritonPythonModel:\n    def execute(self, requests):\n{textwrap.indent(text, ' ' * 8)}"
        folder = tmp_path / "made" / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(file)
        (folder / "model.py").write_text(f"import threading\nimport triton_python_backend_utils as pb_utils\n{text}")
        return weft_model(folder.parent, **options)

    return make


DOUBLE = """
    arrays = [one.inputs()[0].as_numpy() * len(requests) for one in requests]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one)]) for one in arrays]
"""


def test_requests_at_once_share_an_execution(made):
    """Requests that come at once are one batch, as far as the configuration lets them; answers are in their order."""
    model = made(DOUBLE)
    assert [[[3, 6]], [[9, 12]], [[15, 18]]] == [
        one.Y.tolist() for one in model.batch([{"X": [[1, 2]]}, {"X": [[3, 4]]}, {"X": [[5, 6]]}])
    ]
    rows = np.ones((4, 2), np.float32)  # of at most 8
    assert [2, 2, 1] == [one.Y[0, 0] for one in model.batch([{"X": rows}] * 3)]


def test_without_batching_each_runs_alone(made):
    """A configuration without dynamic batching lets no requests share an execution, as in a service."""
    model = made(DOUBLE, CONFIG.replace("dynamic_batching { }", ""))
    assert [1, 3] == [one.Y[0, 0] for one in model.batch([{"X": [[1, 2]]}, {"X": [[3, 4]]}])]


def test_an_error_is_what_the_model_raised(made):
    """What ``execute`` raises comes out with a traceback that ends in the model; of a batch, in the list."""
    model = made("raise KeyError('here')")
    with pytest.raises(KeyError, match="here") as raised:
        model(X=[[1, 2]])
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert ("execute", "raise KeyError('here')") == (frames[-1].name, frames[-1].line)
    assert not any("/weft/serving/" in one.filename for one in frames)
    assert [KeyError, InvalidArgumentError] == [*map(type, model.batch([{"X": [[1, 2]]}, {"Z": [[1, 2]]}]))]


def test_an_error_of_one_response_is_its_own(made):
    """A response with an error fails its request with the class of its code, and no other."""
    model = made(
        """
        errors = [pb_utils.TritonError(f"no {i}", pb_utils.TritonError.NOT_FOUND) for i in range(len(requests))]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", one.inputs()[0].as_numpy())], errors[i] if i else None)
            for i, one in enumerate(requests)
        ]
        """
    )
    good, bad = model.batch([{"X": [[1, 2]]}] * 2)
    assert ([[1, 2]], NotFoundError, "no 1") == (good.Y.tolist(), type(bad), bad.message)


def test_what_a_load_raises_says_where(made):
    """A model that does not load raises the reason with its line, and with the traceback as a note."""
    with pytest.raises(WeftError, match=r"failed to initialize.*model.py:6: ValueError: no weights") as raised:
        made(
            """
            class TritonPythonModel:
                def initialize(self, args):
                    raise ValueError("no weights")
            """
        )
    assert "ValueError: no weights" in "".join(raised.value.__notes__)


STREAM = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT64 dims: 1 } output { name: "I" data_type: TYPE_INT64 dims: 1 }
"""


def test_a_stream_in_order_with_its_end(made):
    """Responses of a decoupled model come in order, more than wait at once, and the last one is final."""
    model = made(
        """
        for one in requests:
            sender, n = one.get_response_sender(), one.inputs()[0].as_numpy()
            for i in range(n[0]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("I", n * 0 + i)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        STREAM,
    )
    *responses, last = model(N=[40])
    assert [*range(40)] == [one.I[0] for one in responses]
    assert ([False] * 40, True, 0) == ([one.is_final for one in responses], last.is_final, len(last))
    assert [1, 3] == [len(one) for one in model.batch([{"N": [0]}, {"N": [2]}])]


def test_a_stream_that_is_dropped_fails(made):
    """A request whose sender is gone without a last response fails, after the responses that were sent."""
    model = made(
        """
        sender = requests[0].get_response_sender()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("I", requests[0].inputs()[0].as_numpy())]))
        """,
        STREAM,
    )
    call = model.start({"N": [3]})
    assert [3] == next(call).I.tolist()
    with pytest.raises(WeftError, match="dropped the request without a last response"):
        next(call)


@pytest.mark.parametrize(
    "config", [CONFIG, STREAM.replace('"N"', '"X"').replace("INT64", "FP32").replace("dims: 1", "dims: 2")]
)
def test_a_client_that_leaves(made, config):
    """``cancel`` leaves while the model executes, and returns when it has seen that and returned."""
    model = made(
        """
        class TritonPythonModel:
            def initialize(self, args):
                globals()["self"] = self
                self.saw = []

            def execute(self, requests):
                while not requests[0].is_cancelled():
                    threading.Event().wait(0.001)
                self.saw.append(requests[0].request_id())
                raise RuntimeError("nobody reads this")
        """,
        config,
    )
    call = model.start({"X": [1, 2]}, request_id="mine")
    call.cancel()
    with pytest.raises(StopIteration):
        next(call)


def test_a_deadline(made):
    """A deadline in milliseconds is what the model sees as a client that has left; an answer comes nevertheless."""
    model = made(
        """
        while not requests[0].is_cancelled():
            threading.Event().wait(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", requests[0].inputs()[0].as_numpy())])]
        """
    )
    assert [[1, 2]] == model.run({"X": [[1, 2]]}, timeout_ms=50).Y.tolist()


def test_what_a_request_brings(made):
    """Parameters, id and asked outputs are those of the request; response parameters come back."""
    model = made(
        """
        one = requests[0]
        parameters = {"got": one.parameters(), "id": one.request_id(), "asked": ",".join(one.requested_output_names())}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one.inputs()[0].as_numpy())], parameters=parameters)]
        """
    )
    answer = model.run({"X": [[1, 2]]}, parameters={"top": 3}, request_id="7", outputs=["Y"])
    assert {"got": '{"top": 3}', "id": "7", "asked": "Y"} == answer.parameters


CALLS = """
    one, responses = requests[0], []
    for name in ("first", "second"):
        call = pb_utils.InferenceRequest(model_name=name, inputs=one.inputs(), requested_output_names=["Y"])
        response = call.exec()
        if response.has_error():
            return [pb_utils.InferenceResponse(error=response.error())]
        responses.append(response.output_tensors()[0].as_numpy())
    return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", responses[0] + responses[1])])]
"""


def test_calls_of_fakes_and_folders(made, tmp_path):
    """A model calls fakes, functions, and models of folders or of Python, which run in this process too."""

    @weft.model(max_batch_size=8)
    def first(X: weft.Tensor[weft.FP32, 2]) -> weft.Outputs(Y=weft.Tensor[weft.FP32, 2]):  # type: ignore[valid-type]
        return {"Y": X * 10}

    fake = weft.fake(Y=np.array([[1, 1]], np.float32))
    model = made(CALLS, models={"first": first, "second": fake})
    assert [[11, 21]] == model(X=[[1, 2]]).Y.tolist()
    assert [[[1, 2]]] == [call["X"].tolist() for call in fake.calls]


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ({"first": lambda X: {"Y": X}}, "'second' is not found; give models={'second': weft.fake(...)} or its folder"),
        ({"first": lambda X: {"Y": X}, "second": weft.fake("UNAVAILABLE")}, "the fake answers UNAVAILABLE"),
        ({"first": NotFoundError("none here")}, "none here"),
        ({"first": lambda X: X.no_such}, "the fake of model 'first' raised AttributeError"),
    ],
)
def test_calls_that_fail(made, models, says):
    """A call of a model that is not given, and a fake that fails, are responses with that error."""
    with pytest.raises(WeftError) as raised:
        made(CALLS, models=models)(X=[[1, 2]])
    assert says in raised.value.message


def test_what_is_no_fake(made):
    """What is neither a fake, nor anything that one is made of, nor a model, is refused at once."""
    with pytest.raises(InvalidArgumentError, match=r"weft.fake\(3, ...\): give constants"):
        made(CALLS, models={"first": 3})


def test_streams_of_other_models(made):
    """A generator stands for a decoupled model that is called."""

    def numbers(X):
        for i in range(3):
            yield {"Y": X + i}

    model = made(
        """
        inputs = requests[0].inputs()
        call = pb_utils.InferenceRequest(model_name="numbers", inputs=inputs, requested_output_names=["Y"])
        total = sum(one.output_tensors()[0].as_numpy() for one in call.exec(decoupled=True) if one.output_tensors())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)])]
        """,
        models={"numbers": numbers},
    )
    assert [[6, 9]] == model(X=[[1, 2]]).Y.tolist()


def test_auto_complete_and_bare_files(tmp_path, weft_model):
    """A ``model.py`` alone needs no folders; ``auto_complete_config`` runs in this process."""
    path = tmp_path / "bare" / "model.py"
    path.parent.mkdir()
    path.write_text(
        textwrap.dedent(
            """
            import os
            import helper
            import triton_python_backend_utils as pb_utils


            class TritonPythonModel:
                @staticmethod
                def auto_complete_config(config):
                    config.add_input({"name": "X", "data_type": "TYPE_INT64", "dims": [1]})
                    config.add_output({"name": helper.NAME, "data_type": "TYPE_INT64", "dims": [1]})
                    return config

                def execute(self, requests):
                    pid = requests[0].inputs()[0].as_numpy() * 0 + os.getpid()
                    return [pb_utils.InferenceResponse([pb_utils.Tensor(helper.NAME, pid)])]
            """
        )
    )
    (path.parent / "helper.py").write_text("NAME = 'PID'\n")
    model = weft_model(path)
    assert ("bare", os.getpid()) == (model.name, model(X=[1]).PID[0])


@pytest.mark.parametrize("path", ["", "1", "2", "1/model.py", "2/model.py"])
def test_every_way_to_name_a_model(path, weft_model, tmp_path):
    """A model is named by its folder, which is its highest version, by that of a version, or by a file."""
    for version in ("1", "2"):
        (tmp_path / "two" / version).mkdir(parents=True)
        text = textwrap.indent(DOUBLE.replace("len(requests)", version), "    ")
        (tmp_path / "two" / version / "model.py").write_text(
            "import triton_python_backend_utils as pb_utils\nclass TritonPythonModel:\n    def execute(self, requests):"
            + text
        )
    (tmp_path / "two" / "config.pbtxt").write_text(CONFIG)
    assert int(path[:1] or 2) == weft_model(tmp_path / "two" / path)(X=[[1, 2]]).Y[0, 0]


def test_a_model_that_is_not_there(weft_model, tmp_path):
    """A path without a model is an error that says what may be given."""
    with pytest.raises(NotFoundError, match=r"there is no .*; give a model.py, or the folder of a model"):
        weft_model(tmp_path / "nowhere")


def test_a_configuration_in_place_of_the_file(made):
    """The text of another configuration may stand for that of the file."""
    model = made(DOUBLE, "nonsense: 1", config=CONFIG.replace("dynamic_batching { }", 'name: "made"'))
    assert [1, 1] == [one.Y[0, 0] for one in model.batch([{"X": [[1, 2]]}] * 2)]


def test_after_the_block_it_is_unloaded(made, tmp_path):
    """``close`` calls ``finalize``, and ends the threads."""
    model = made(
        f"""
        class TritonPythonModel:
            def execute(self, requests): ...

            def finalize(self):
                open({str(tmp_path / "finalized")!r}, "w").close()
        """
    )
    model.close()
    assert (tmp_path / "finalized").exists()
    assert not [one for one in threading.enumerate() if one.name == "weft-testing"]


@pytest.mark.parametrize(
    ("name", "says"), [("double", "that of the tested model"), ("other", "not that of model 'double'")]
)
def test_models_of_other_names(weft_model, name, says):
    """A model that is called may be neither the tested one, nor a model of Python by another name than its own."""

    @weft.model
    def double(X: weft.Tensor[weft.FP32, 1]) -> weft.Outputs(Y=weft.Tensor[weft.FP32, 1]):  # type: ignore[valid-type]
        return {"Y": X + X}

    @weft.model
    def main(X: weft.Tensor[weft.FP32, 1]) -> weft.Outputs(Y=weft.Tensor[weft.FP32, 1]):  # type: ignore[valid-type]
        return {"Y": X}

    tested, models = (double, {name: weft.fake({})}) if name == "double" else (main, {name: double})
    with pytest.raises(InvalidArgumentError, match=says):
        weft_model(tested, models)
