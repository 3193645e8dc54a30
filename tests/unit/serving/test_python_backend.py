"""The ``python`` backend: a ``model.py`` written for Triton Inference Server runs as it is."""

import itertools
import json
import logging
import sys
import threading
from textwrap import dedent

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.base.errors import InternalError, InvalidArgumentError, NotFoundError
from weft.serving.backends.base import InstanceContext
from weft.serving.backends.python import PythonBackend

INPUTS = {"INPUT0": ("FP32", (4,)), "INPUT1": ("FP32", (4,))}
OUTPUTS = {"OUTPUT0": ("FP32", (4,)), "OUTPUT1": ("FP32", (4,))}

# The shape of the tutorials' first model.
ADD_SUB = """
    import json
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            self.model_config = model_config = json.loads(args["model_config"])
            output0 = pb_utils.get_output_config_by_name(model_config, "OUTPUT0")
            self.dtype = pb_utils.triton_string_to_numpy(output0["data_type"])
            assert output0["dims"] == [4]
            assert pb_utils.get_input_config_by_name(model_config, "INPUT1")["data_type"] == "TYPE_FP32"
            assert not pb_utils.using_decoupled_model_transaction_policy(model_config)
            self.args = args

        def execute(self, requests):
            responses = []
            for request in requests:
                in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
                in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
                out_0, out_1 = in_0.as_numpy() + in_1.as_numpy(), in_0.as_numpy() - in_1.as_numpy()
                responses.append(
                    pb_utils.InferenceResponse(
                        output_tensors=[
                            pb_utils.Tensor("OUTPUT0", out_0.astype(self.dtype)),
                            pb_utils.Tensor("OUTPUT1", out_1.astype(self.dtype)),
                        ]
                    )
                )
            return responses

        def finalize(self):
            print("Cleaning up...")
"""
HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n"


def _model_modules():
    return {name for name in sys.modules if name.startswith("weft_python_model_")}


@pytest.fixture
def write_model(version_folder):
    """Writes ``model.py``."""

    def write(source, folder=version_folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(dedent(source))
        return folder

    return write


@pytest.fixture
def make_backend(write_model, make_model_context):
    """Makes a loaded backend from the source of its model."""

    def make(source, inputs=INPUTS, outputs=OUTPUTS, **options):
        write_model(source)
        return load_backend(PythonBackend, make_model_context(inputs, outputs, **options))

    return make


@pytest.fixture
def executing(make_backend):
    """Makes a loaded backend from the body of ``execute``."""

    def make(body, **options):
        lines = "".join(f"        {line}\n" for line in dedent(body).strip().splitlines())
        return make_backend(f"{HEAD}    def execute(self, requests):\n{lines}", **options)

    return make


@pytest.fixture
def pair():
    """Two requests of one and two rows."""
    ones = np.ones((2, 4), np.float32)
    return [
        make_served_request(INPUT0=ones[:1] * 3, INPUT1=ones[:1], request_id="a"),
        make_served_request(INPUT0=ones * 5, INPUT1=ones * 2, request_id="b", wants=("OUTPUT0",)),
    ]


def test_tutorial_model_runs_unmodified(make_backend, pair, capsys):
    """Sum and difference of each request come back; what the model prints does not reach standard output."""
    backend = make_backend(ADD_SUB)
    outcomes = execute_batch(backend, *pair)
    assert [(4.0, 2.0), (7.0, 3.0)] == [(o.outputs["OUTPUT0"][0, 0], o.outputs["OUTPUT1"][0, 0]) for o in outcomes]
    assert [(1, 4), (2, 4)] == [outcome.outputs["OUTPUT1"].shape for outcome in outcomes]
    backend.close()
    assert ("", "Cleaning up...\n") == capsys.readouterr()


def test_initialize_gets_the_strings_of_triton(make_model_context, write_model):
    """Every value of args is a string, the folder is the model's, and 64-bit numbers are numbers."""
    folder = write_model(ADD_SUB)
    config = {
        "dynamic_batching": {"max_queue_delay_microseconds": "100"},
        "version_policy": {"specific": {"versions": ["1"]}},
    }
    backend = PythonBackend(
        make_model_context(INPUTS, OUTPUTS, config=config), InstanceContext("model_0_3", kind="GPU", device_id=2)
    )
    backend.load()
    args = dict(backend._runner._model.args)
    model_config = json.loads(args.pop("model_config"))
    assert {
        "model_instance_kind": "GPU",
        "model_instance_name": "model_0_3",
        "model_instance_device_id": "2",
        "model_repository": str(folder.parent),
        "model_version": "1",
        "model_name": "model",
    } == args
    assert 100 == model_config["dynamic_batching"]["max_queue_delay_microseconds"]
    assert [1] == model_config["version_policy"]["specific"]["versions"]
    assert ({}, 8) == (model_config["parameters"], model_config["max_batch_size"])


def test_error_response_fails_its_own_request(executing, pair):
    """A TritonError becomes the status of its code for one request; the other one has its answer."""
    backend = executing(
        """
        zeros = pb_utils.Tensor("OUTPUT0", np.zeros((1, 4), np.float32))
        good = pb_utils.InferenceResponse([zeros], parameters={"n": 1})
        bad = pb_utils.InferenceResponse([], pb_utils.TritonError("no such row", pb_utils.TritonError.NOT_FOUND))
        return [good, bad]
        """
    )
    good, bad = execute_batch(backend, *pair)
    assert {"n": 1} == good.parameters
    assert isinstance(bad, NotFoundError)
    assert "no such row" == bad.message


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("UNKNOWN", "UNKNOWN"),
        ("INTERNAL", "INTERNAL"),
        ("NOT_FOUND", "NOT_FOUND"),
        ("INVALID_ARG", "INVALID_ARGUMENT"),
        ("UNAVAILABLE", "UNAVAILABLE"),
        ("UNSUPPORTED", "UNIMPLEMENTED"),
        ("ALREADY_EXISTS", "ALREADY_EXISTS"),
        ("CANCELLED", "CANCELLED"),
    ],
)
def test_codes_of_errors_become_statuses(executing, pair, code, status):
    """Each code that a model can set has its own status."""
    backend = executing(
        f"return [pb_utils.InferenceResponse(error=pb_utils.TritonError('sorry', pb_utils.TritonError.{code}))]"
    )
    (outcome,) = execute_batch(backend, pair[0])
    assert status == outcome.code
    assert outcome.message.startswith("sorry")


def test_error_without_code_is_internal_and_logged(executing, pair, caplog):
    """A bare TritonError is INTERNAL with the model's text, and the log has the same error id."""
    backend = executing("return [pb_utils.InferenceResponse(error=pb_utils.TritonError('out of ideas'))]")
    with caplog.at_level(logging.ERROR):
        (outcome,) = execute_batch(backend, pair[0])
    assert isinstance(outcome, InternalError)
    assert [outcome.error_id] == [record.error_id for record in caplog.records]


def test_exception_in_execute_is_passed_on(executing, pair):
    """What execute raises reaches the instance, which answers INTERNAL."""
    backend = executing("raise ValueError('boom')")
    with pytest.raises(ValueError, match="boom"):
        execute_batch(backend, *pair)


@pytest.mark.parametrize(("body", "count"), [("return []", 0), ("pass", 0), ("return [None] * 3", 3)])
def test_wrong_number_of_responses_is_an_error(executing, pair, body, count):
    """Too few, too many or no list of responses is INTERNAL with both numbers."""
    with pytest.raises(InternalError, match=f"returned {count} responses for 2 requests"):
        execute_batch(executing(body), *pair)


def test_response_of_another_type_is_an_error(executing, pair):
    """A None among the responses fails its own request."""
    (outcome,) = execute_batch(executing("return [None]"), pair[0])
    assert "returned NoneType in place of an InferenceResponse" in outcome.message


def test_request_tells_what_the_client_sent(executing, pair):
    """Id, requested outputs, parameters, timeout and cancellation are those of the request.

    Parameters that the server reads are not passed on as the model's own: C++ clients send one with every request.
    """
    backend = executing(
        """
        self.seen = [
            (r.request_id(), r.requested_output_names(), r.parameters(), r.timeout(), r.is_cancelled())
            + (r.correlation_id(),)
            for r in requests
        ]
        return [pb_utils.InferenceResponse() for _ in requests]
        """
    )
    pair[1].call.parameters = {
        "sequence_id": 7,
        "flag": True,
        "timeout": 250,
        "priority": 1,
        "triton_enable_empty_final_response": False,
    }
    pair[1].is_cancelled = True
    execute_batch(backend, *pair)
    assert [
        ("a", ["OUTPUT0", "OUTPUT1"], "{}", 0, False, 0),
        ("b", ["OUTPUT0"], '{"flag": true}', 250, True, 7),
    ] == backend._runner._model.seen


def test_python_code_gives_way_to_the_event_loop(executing):
    """A process with a Python model makes its threads give way sooner than Python does by itself, or than before."""
    before_s = sys.getswitchinterval()
    try:
        for asked_s, expected_s in ((0.005, 0.0005), (0.0001, 0.0001)):
            sys.setswitchinterval(asked_s)
            executing("pass")
            assert pytest.approx(expected_s, abs=2e-6) == sys.getswitchinterval()  # Python keeps microseconds
    finally:
        sys.setswitchinterval(before_s)


def test_inputs_may_be_changed_in_place(executing, pair):
    """A model may compute in its inputs; the request itself stays as it was sent."""
    backend = executing(
        """
        array = requests[0].inputs()[0].as_numpy()
        array += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])]
        """
    )
    (outcome,) = execute_batch(backend, pair[0])
    assert 4.0 == outcome.outputs["OUTPUT0"][0, 0]
    assert 3.0 == pair[0].array("INPUT0")[0, 0]


def test_strings_come_as_bytes(make_backend):
    """BYTES inputs are object arrays of bytes, and str or bytes may be answered."""
    backend = make_backend(
        HEAD
        + """
    def execute(self, requests):
        texts = [t.decode().upper() for t in requests[0].inputs()[0].as_numpy().ravel()]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(texts, object).reshape(-1, 1))])]
""",
        {"TEXT": ("BYTES", (1,))},
        {"OUT": ("BYTES", (1,))},
    )
    (outcome,) = execute_batch(backend, make_served_request(TEXT=["größe", ""]))
    assert [["GRÖSSE"], [""]] == outcome.outputs["OUT"].tolist()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_package", "model.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("x = (\n", "model.py:1: SyntaxError: '(' was never closed"),
        ("\n\nraise KeyError('here')", "model.py:3: KeyError: 'here'"),
        ("x = 1", "has no class TritonPythonModel"),
        ("class TritonPythonModel:\n    pass", "TritonPythonModel has no method execute"),
        (
            HEAD + "    execute = list\n\n    def initialize(self, args):\n        1 / 0",
            "model.py:9: ZeroDivisionError",
        ),
        (
            HEAD + "    def execute(self, r): pass\n    def initialize(self, args):\n        open('/nope')",
            "FileNotFoundError",
        ),
    ],
)
def test_model_that_does_not_start_is_a_load_error(make_backend, source, message):
    """The error has file, line, kind and text, and no traceback; nothing of the module stays behind."""
    modules = _model_modules()
    with pytest.raises(InvalidArgumentError) as error:
        make_backend(source)
    assert message in error.value.message
    assert "Traceback" not in error.value.message
    assert modules == _model_modules()


def test_execute_may_be_a_coroutine(make_backend, pair):
    """A coroutine answers the batch as a plain function does; what it raises is passed on, an exit too."""
    backend = make_backend(
        "import asyncio, sys\n"
        + HEAD
        + """
    async def execute(self, requests):
        await asyncio.sleep(0)
        if len(requests) == 1:
            sys.exit(3)
        tensors = [pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy()) for request in requests]
        return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
"""
    )
    assert [3.0, 5.0] == [outcome.outputs["OUTPUT0"][0, 0] for outcome in execute_batch(backend, *pair)]
    with pytest.raises(RuntimeError, match="execute raised SystemExit"):
        execute_batch(backend, pair[0])
    backend.close()


def test_response_may_be_sent_in_place_of_being_returned(executing, pair):
    """A model that is not decoupled may send its one response, also late and from another thread, and return None."""
    backend = executing(
        """
        import threading
        def answer(sender, value):
            tensor = pb_utils.Tensor("OUTPUT0", np.full((1, 4), value, np.float32))
            sender.send(pb_utils.InferenceResponse([tensor]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        for value, request in enumerate(requests):
            threading.Thread(target=answer, args=(request.get_response_sender(), value)).start()
        """
    )
    outcomes = execute_batch(backend, *pair)
    assert [0.0, 1.0] == [outcome.outputs["OUTPUT0"][0, 0] for outcome in outcomes]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sender.send(flags=1)", "cannot send complete final before sending a"),
        ("sender.send(response); sender.send(response)", "cannot send more than one response"),
        ("", "dropped the request without a last response"),
        ("sender.send(response, 1); return [None]; ", ""),
        ("sender.send(response, 1); return [None] * 2", "returned 2 responses for 1 requests"),
    ],
)
def test_sent_response_must_be_exactly_one(executing, pair, body, message):
    """None, two, or a sender that is dropped fail the request, and never block the instance."""
    backend = executing(
        f"""
        sender, response = requests[0].get_response_sender(), pb_utils.InferenceResponse()
        del requests[:]
        {body or "pass"}
        """
    )
    try:
        (outcome,) = execute_batch(backend, pair[0])
        text = getattr(outcome, "message", "")
    except Exception as error:
        text = str(error)
    assert message in text
    assert bool(message) == bool(text)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("raise ValueError('late')", "failed to execute the request"),
        ("raise pb_utils.TritonModelException('late')", "message: TritonModelException: late"),
        ("return [pb_utils.InferenceResponse(error=pb_utils.TritonError('late'))] * 2", "late"),
        ("return [pb_utils.InferenceResponse(), pb_utils.InferenceResponse(error=pb_utils.TritonError('b'))]", "b"),
    ],
)
def test_an_answer_that_was_sent_as_the_last_stands(executing, pair, after, message):
    """What the model raises or returns later fails only the requests that it had not answered."""
    backend = executing(
        f"""
        sender = requests[0].get_response_sender()
        tensor = pb_utils.Tensor("OUTPUT0", np.full((1, 4), 7, np.float32))
        sender.send(pb_utils.InferenceResponse([tensor]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        {after}
        """
    )
    answered, failed = execute_batch(backend, *pair)
    assert 7.0 == answered.outputs["OUTPUT0"][0, 0]
    assert ("INTERNAL", True) == (failed.code, message in failed.message)


def test_missing_model_file_is_a_load_error(make_model_context):
    """Without model.py the error names the file."""
    with pytest.raises(NotFoundError, match=r"has no file 'model.py'"):
        load_backend(PythonBackend, make_model_context(INPUTS, OUTPUTS))


def test_models_do_not_share_their_modules(tmp_path, write_model, make_model_context, pair):
    """Two models, each with a ``helper.py`` of its own, also imported late, run side by side and leave nothing."""
    source = """
        import helper
        from helper import VALUE
        from .helper import VALUE as relative
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                import late.inner
                from late import inner
                assert helper.VALUE == VALUE == relative == inner.VALUE == late.inner.VALUE
                output = VALUE * requests[0].inputs()[0].as_numpy()
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", output)])]
    """
    modules, backends = _model_modules(), []
    for number in (1, 2):
        folder = write_model(source, tmp_path / f"m{number}" / "1")
        (folder / "helper.py").write_text(f"from late.inner import VALUE\nassert VALUE == {number}\n")
        (folder.parent / "late").mkdir()
        (folder.parent / "late" / "__init__.py").touch()
        (folder.parent / "late" / "inner.py").write_text(f"VALUE = {number}\n")
        backends.append(load_backend(PythonBackend, make_model_context(INPUTS, OUTPUTS, directory=folder)))
    assert [3.0, 6.0] == [execute_batch(backend, pair[0])[0].outputs["OUTPUT0"][0, 0] for backend in backends]
    for backend in backends:
        backend.close()
    assert not {"helper", "late", "late.inner"} & set(sys.modules)
    assert modules == _model_modules()


def test_instances_do_not_share_module_state(make_backend, write_model, make_model_context):
    """Each instance runs the file anew, so module globals are its own."""
    source = "STATE = []\n" + HEAD + "    state = STATE\n\n    def execute(self, requests): pass\n"
    first, second = make_backend(source), make_backend(source)
    assert first._runner._model.state is not second._runner._model.state


def test_edited_model_is_loaded_anew(make_backend):
    """A reload reads the file as it is, also if it was edited within the clock's tick and has the same size."""
    source = HEAD + "    value = {}\n\n    def execute(self, requests): pass\n"
    assert [1, 2] == [make_backend(source.format(value))._runner._model.value for value in (1, 2)]


def test_models_load_on_several_threads_at_once(write_model, make_model_context, tmp_path):
    """Instances that load at the same time each get a module of their own."""
    backends = []
    for number in range(4):
        folder = write_model(f"NUMBER = {number}\n" + dedent(ADD_SUB), tmp_path / f"m{number}" / "1")
        model = make_model_context(INPUTS, OUTPUTS, directory=folder)
        backends.append(PythonBackend(model, InstanceContext("i")))
    threads = [threading.Thread(target=backend.load) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [0, 1, 2, 3] == [backend._runner._module.NUMBER for backend in backends]


def test_modules_go_while_others_come(make_backend, monkeypatch):
    """A model closes, its modules and metrics with it, while another thread imports."""
    released = []
    is_over = threading.Event()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def importing():
        for number in itertools.count():
            if is_over.is_set():
                return
            sys.modules[f"imported_{number % 1000}"] = sys
            sys.modules.pop(f"imported_{(number + 500) % 1000}", None)

    before = _model_modules()
    thread = threading.Thread(target=importing)
    thread.start()
    try:
        for _ in range(50):
            backend = make_backend(HEAD + "    def execute(self, r): pass\n")
            monkeypatch.setattr(backend._runner, "_release_metrics", lambda: released.append(1))
            backend.close()
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)
        for name in [name for name in sys.modules if name.startswith("imported_")]:
            del sys.modules[name]
    assert (50, before) == (len(released), _model_modules())


def test_execute_may_be_set_by_initialize(make_backend, pair):
    """A function, or a coroutine function, that initialize puts on the instance is what is executed."""
    for kind in ("", "async "):
        source = f"""
            import triton_python_backend_utils as pb_utils


            class TritonPythonModel:
                def initialize(self, args):
                    self.execute = self.run

                {kind}def run(self, requests):
                    return [pb_utils.InferenceResponse([request.inputs()[0]]) for request in requests]
        """
        outcomes = execute_batch(make_backend(source), *pair)
        assert [["INPUT0"], ["INPUT0"]] == [list(outcome.outputs) for outcome in outcomes]


def test_model_may_import_itself(make_backend, monkeypatch, tmp_path):
    """``import model`` is the model's file, also where the folder of the service has a folder of that name."""
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "model", raising=False)
    backend = make_backend(
        """
        import json
        import model as itself

        NUMBER = 7


        class TritonPythonModel:
            def execute(self, requests): pass
            def number(self):
                import model
                return model.NUMBER, itself is model
        """
    )
    assert (7, True) == backend._runner._model.number()


def test_raising_finalize_is_logged(make_backend, caplog):
    """Closing succeeds although the model's finalize raises."""
    backend = make_backend(HEAD + "    def execute(self, r): pass\n    def finalize(self): raise ValueError('late')\n")
    backend.close()
    assert ["finalize failed"] == [record.message for record in caplog.records]
