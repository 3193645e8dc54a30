"""The ``onnxruntime`` backend against files built here."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends import BACKENDS
from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from weft.serving.backends.base import InstanceContext
from weft.serving.config.placement import count_gpus

INPUTS = {"A": ("FP32", (3,)), "B": ("FP32", (3,))}
OUTPUTS = {"SUM": ("FP32", (3,)), "DIFFERENCE": ("FP32", (3,))}


def _value(name, element, shape):
    return helper.make_tensor_value_info(name, element, shape)


def _save(folder, nodes, inputs, outputs, initializers=(), filename="model.onnx"):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / filename)


@pytest.fixture
def add_sub(version_folder):
    """Writes the model of two inputs and two outputs, and an output that no configuration declares."""

    def write(batch="batch", **options):
        shape = [batch, 3]
        _save(
            version_folder,
            [
                helper.make_node("Add", ["A", "B"], ["SUM"]),
                helper.make_node("Sub", ["A", "B"], ["DIFFERENCE"]),
                helper.make_node("Neg", ["A"], ["EXTRA"]),
            ],
            [_value(name, TensorProto.FLOAT, shape) for name in ("A", "B")],
            [_value(name, TensorProto.FLOAT, shape) for name in ("SUM", "DIFFERENCE", "EXTRA")],
            **options,
        )

    return write


@pytest.fixture
def load_onnx(make_model_context):
    """Makes a loaded backend."""

    def load(inputs=INPUTS, outputs=OUTPUTS, **options):
        return load_backend(BACKENDS["onnxruntime"], make_model_context(inputs, outputs, **options))

    return load


def test_requests_of_a_batch_get_their_own_rows(add_sub, load_onnx):
    """Sum and difference of each request come back apart; outputs that are not declared do not."""
    add_sub()
    random = np.random.default_rng(0)
    cases = [random.normal(size=(2, n, 3)).astype(np.float32) for n in (1, 3, 2)]
    outcomes = execute_batch(load_onnx(), *(make_served_request(A=a, B=b) for a, b in cases))
    for outcome, (a, b) in zip(outcomes, cases, strict=True):
        assert ["SUM", "DIFFERENCE"] == list(outcome.outputs)
        np.testing.assert_array_equal(a + b, outcome.outputs["SUM"])
        np.testing.assert_array_equal(a - b, outcome.outputs["DIFFERENCE"])


def test_model_without_batch_dimension(add_sub, load_onnx):
    """With max_batch_size 0 the dims are the whole shape, and may be narrower than the file's."""
    add_sub(batch="any")
    backend = load_onnx(dict.fromkeys(INPUTS, ("FP32", (5, 3))), {"SUM": ("FP32", (-1, 3))}, max_batch_size=0)
    ones = np.ones((5, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(A=ones, B=ones))
    np.testing.assert_array_equal(ones * 2, outcome.outputs["SUM"])


def test_values_that_the_model_cannot_take_are_the_clients_fault(version_folder, load_onnx):
    """An index that is out of bounds is INVALID_ARGUMENT, with what the operator says; good ones are looked up."""
    _save(
        version_folder,
        [helper.make_node("Gather", ["table", "X"], ["Y"])],
        [_value("X", TensorProto.INT64, ["n", 1])],
        [_value("Y", TensorProto.FLOAT, ["n", 1])],
        [helper.make_tensor("table", TensorProto.FLOAT, [2], [5.0, 7.0])],
    )
    backend = load_onnx({"X": ("INT64", (1,))}, {"Y": ("FP32", (1,))})
    (outcome,) = execute_batch(backend, make_served_request(X=np.array([[1], [0]])))
    assert [[7.0], [5.0]] == outcome.outputs["Y"].tolist()
    with pytest.raises(InvalidArgumentError, match=r"cannot take the values .*: .*indices element out of data"):
        execute_batch(backend, make_served_request(X=np.array([[2]])))


def test_default_model_filename_is_used(add_sub, load_onnx):
    """``default_model_filename`` names another file."""
    add_sub(filename="net.onnx")
    zeros = np.zeros((1, 3), np.float32)
    (outcome,) = execute_batch(
        load_onnx(config={"default_model_filename": "net.onnx"}), make_served_request(A=zeros, B=zeros)
    )
    np.testing.assert_array_equal(zeros, outcome.outputs["SUM"])


@pytest.mark.parametrize(
    "parameters",
    [
        {"intra_op_thread_count": "2", "inter_op_thread_count": "2", "execution_mode": "1"},
        {"intra_op_thread_count": "0", "enable_mem_arena": "0", "enable_mem_pattern": "false"},
    ],
)
@pytest.mark.parametrize("level", [-1, 0, 1, 2])
def test_session_options_do_not_change_answers(add_sub, load_onnx, parameters, level):
    """Every thread, memory and graph option loads and gives the same numbers."""
    add_sub()
    backend = load_onnx(config={"optimization": {"graph": {"level": level}}}, **parameters)
    ones = np.ones((1, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(A=ones, B=ones))
    np.testing.assert_array_equal(ones * 2, outcome.outputs["SUM"])


def test_one_thread_by_default(add_sub, load_onnx):
    """Without parameters a session computes on the instance's thread alone."""
    add_sub()
    options = load_onnx()._session.get_session_options()
    assert (1, 1) == (options.intra_op_num_threads, options.inter_op_num_threads)


@pytest.mark.parametrize(
    ("parameters", "can"),
    [
        ({}, True),
        ({"intra_op_thread_count": "2"}, False),
        ({"intra_op_thread_count": "0"}, False),
        ({"execution_mode": "1", "inter_op_thread_count": "2"}, False),
    ],
)
def test_only_a_session_without_threads_of_its_own_runs_in_the_background(add_sub, load_onnx, parameters, can):
    """Threads of the session work for every execution, at one priority of the operating system."""
    add_sub()
    assert load_onnx(**parameters).can_share_processor() is can


def test_two_threads_get_their_own_answers_from_one_session(add_sub, load_onnx):
    """Executions beside each other do not mix up their rows."""
    add_sub()
    backend = load_onnx()

    def executed(number):
        rows = np.full((1 + number % 7, 3), number, np.float32)
        (outcome,) = execute_batch(backend, make_served_request(A=rows, B=rows))
        return np.array_equal(outcome.outputs["SUM"], rows * 2)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(executed, range(200)))


@pytest.fixture
def repeating(version_folder):
    """Writes a model that repeats strings."""
    _save(
        version_folder,
        [helper.make_node("StringConcat", ["flat", "flat"], ["twice"])],
        [_value("flat", TensorProto.STRING, ["n"])],
        [_value("twice", TensorProto.STRING, ["n"])],
    )


def test_strings_go_in_and_out(repeating, load_onnx):
    """BYTES inputs reach the model as UTF-8, and its strings are answered."""
    backend = load_onnx({"flat": ("BYTES", (-1,))}, {"twice": ("BYTES", (-1,))}, max_batch_size=0)
    texts = np.array([b"abc", b"", "größe 東京".encode()], np.object_)
    (outcome,) = execute_batch(backend, make_served_request(flat=texts))
    assert ["abcabc", "", "größe 東京größe 東京"] == outcome.outputs["twice"].tolist()


def test_invalid_utf8_fails_its_own_request(version_folder, load_onnx):
    """A string that is not UTF-8 is INVALID_ARGUMENT for one request of a batch."""
    _save(
        version_folder,
        [helper.make_node("Identity", ["T"], ["U"])],
        [_value("T", TensorProto.STRING, ["n", 1])],
        [_value("U", TensorProto.STRING, ["n", 1])],
    )
    backend = load_onnx({"T": ("BYTES", (1,))}, {"U": ("BYTES", (1,))})
    good, bad, last = execute_batch(
        backend, *(make_served_request(T=texts) for texts in (["a", "b"], ["c", b"\xff"], ["d"]))
    )
    assert isinstance(bad, InvalidArgumentError)
    assert "input 'T' element [1, 0] is not UTF-8" in bad.message
    assert [[["a"], ["b"]], [["d"]]] == [good.outputs["U"].tolist(), last.outputs["U"].tolist()]


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT16", "UINT32", "INT64", "UINT64", "FP16", "FP64"])
def test_datatypes_pass_unchanged(version_folder, load_onnx, datatype):
    """Each datatype goes through an identity bit for bit."""
    names = {"FP16": "FLOAT16", "FP64": "DOUBLE"}
    element = getattr(TensorProto, names.get(datatype, datatype))
    _save(
        version_folder,
        [helper.make_node("Identity", ["X"], ["Y"])],
        [_value("X", element, ["n", 2])],
        [_value("Y", element, ["n", 2])],
    )
    array = np.array([[0, 1]], helper.tensor_dtype_to_np_dtype(element))
    (outcome,) = execute_batch(
        load_onnx({"X": (datatype, (2,))}, {"Y": (datatype, (2,))}), make_served_request(X=array)
    )
    assert array.dtype == outcome.outputs["Y"].dtype
    np.testing.assert_array_equal(array, outcome.outputs["Y"])


@pytest.fixture
def scaled(version_folder):
    """A model whose second input has a default in the file."""
    _save(
        version_folder,
        [helper.make_node("Mul", ["X", "W"], ["Y"])],
        [_value("X", TensorProto.FLOAT, ["n", 2]), _value("W", TensorProto.FLOAT, ["m", 2])],
        [_value("Y", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor("W", TensorProto.FLOAT, [1, 2], [10, 100])],
    )


def test_input_with_a_default_is_optional(scaled, load_onnx):
    """An input that the file has a default for may be undeclared, or declared optional and left out."""
    ones = np.ones((1, 2), np.float32)
    backend = load_onnx({"X": ("FP32", (2,))}, {"Y": ("FP32", (2,))})
    (outcome,) = execute_batch(backend, make_served_request(X=ones))
    assert [[10.0, 100.0]] == outcome.outputs["Y"].tolist()


def test_optional_input_without_default_is_a_load_error(add_sub, load_onnx):
    """The configuration may not make optional what the file needs."""
    add_sub()
    with pytest.raises(
        InvalidArgumentError, match=r"input 'B' is optional in the configuration, but .* has no default"
    ):
        load_onnx(optional=("B",))


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "messages"),
    [
        (
            {**INPUTS, "B": ("FP64", (3,))},
            OUTPUTS,
            {},
            ["input 'B' is FP64 [-1, 3] by the configuration", "but FP32 [-1, 3] in "],
        ),
        (INPUTS, {"SUM": ("FP32", (4,))}, {}, ["output 'SUM' is FP32 [-1, 4]", "but FP32 [-1, 3] in"]),
        ({**INPUTS, "A": ("FP32", (-1,))}, OUTPUTS, {}, ["input 'A' is FP32 [-1, -1]"]),
        ({**INPUTS, "A": ("FP32", (3, 1))}, OUTPUTS, {}, ["input 'A' is FP32 [-1, 3, 1]"]),
        ({"A": INPUTS["A"]}, OUTPUTS, {}, ["needs input 'B', which the configuration does not declare"]),
        ({**INPUTS, "C": ("FP32", (3,))}, OUTPUTS, {}, ["has no input 'C'; it has 'A', 'B'"]),
        (INPUTS, {"TOTAL": ("FP32", (3,))}, {}, ["has no output 'TOTAL'; it has 'SUM', 'DIFFERENCE', 'EXTRA'"]),
        (INPUTS, OUTPUTS, {"execution_mode": "2"}, ["'execution_mode' must be a whole number from 0 to 1, got '2'"]),
        (
            INPUTS,
            OUTPUTS,
            {"config": {"optimization": {"graph": {"level": 7}}}},
            ["level must be -1, 0, 1 or 2, got 7"],
        ),
        (INPUTS, OUTPUTS, {"config": {"default_model_filename": "../1/model.onnx"}}, ["leaves"]),
    ],
)
def test_configuration_that_differs_from_the_file_is_a_load_error(
    add_sub, load_onnx, inputs, outputs, options, messages
):
    """The error has what the configuration says and what the file says."""
    add_sub()
    with pytest.raises(InvalidArgumentError) as error:
        load_onnx(inputs, outputs, **options)
    for message in messages:
        assert message in error.value.message


def test_fixed_batch_dimension_cannot_be_batched(add_sub, load_onnx):
    """A file exported for one batch size is refused with max_batch_size above 0."""
    add_sub(batch=4)
    with pytest.raises(InvalidArgumentError, match=r"\(max_batch_size 8\), but FP32 \[4, 3\]"):
        load_onnx()


@pytest.mark.parametrize(("device", "name"), [("gpu", "tensorrt"), ("cpu", "openvino"), ("cpu", "cuda")])
def test_other_accelerators_are_refused(add_sub, load_onnx, device, name):
    """An accelerator that is not on offer is an error, not ignored."""
    add_sub()
    accelerators = {f"{device}_execution_accelerator": [{"name": name}]}
    with pytest.raises(UnsupportedError, match=f"'{name}' is not supported by this version"):
        load_onnx(config={"optimization": {"execution_accelerators": accelerators}})


def test_bfloat16_is_refused(version_folder, load_onnx):
    """A BF16 tensor, which numpy and ONNX Runtime do not exchange, is a load error."""
    _save(
        version_folder,
        [helper.make_node("Cast", ["X"], ["Y"], to=TensorProto.BFLOAT16)],
        [_value("X", TensorProto.FLOAT, ["n", 2])],
        [_value("Y", TensorProto.BFLOAT16, ["n", 2])],
    )
    with pytest.raises(InvalidArgumentError, match=r"'Y' is BF16 .* but tensor\(bfloat16\)"):
        load_onnx({"X": ("FP32", (2,))}, {"Y": ("BF16", (2,))})


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_broken_file_is_a_load_error(version_folder, load_onnx, content):
    """A file that is no ONNX model is INVALID_ARGUMENT with its path."""
    (version_folder / "model.onnx").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"ONNX Runtime cannot load .*model.onnx"):
        load_onnx()


def test_missing_file_is_a_load_error(load_onnx):
    """Without the file the error names it."""
    with pytest.raises(NotFoundError, match=r"has no file 'model.onnx'"):
        load_onnx()


@pytest.mark.skipif(count_gpus() > 0, reason="needs a machine without a GPU")
def test_gpu_instance_does_not_fall_back_to_the_cpu(add_sub, make_model_context):
    """Where CUDA does not load, a GPU instance is an error with the cure."""
    add_sub()
    backend = BACKENDS["onnxruntime"](make_model_context(INPUTS, OUTPUTS), InstanceContext("model_0_0", kind="GPU"))
    with pytest.raises(UnavailableError, match=r"asks for GPU 0, but ONNX Runtime cannot load CUDA here; install"):
        backend.load()


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU")
def test_gpu_instance_runs_on_cuda(add_sub, make_model_context):
    """A GPU instance computes with the CUDA provider."""
    add_sub()
    backend = BACKENDS["onnxruntime"](make_model_context(INPUTS, OUTPUTS), InstanceContext("model_0_0", kind="GPU"))
    backend.load()
    ones = np.ones((1, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(A=ones, B=ones))
    assert "CUDAExecutionProvider" == backend._session.get_providers()[0]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(ones * 2, outcome.outputs["SUM"])


def test_unknown_parameters_are_told_and_ignored(add_sub, load_onnx, caplog):
    """A configuration of Triton Inference Server may have parameters that mean nothing here."""
    add_sub()
    load_onnx(intra_op_threads="1", unheard_of="x")
    told = [record.getMessage() for record in caplog.records]
    assert (
        "parameter 'intra_op_threads' is not known and has no effect; did you mean 'intra_op_thread_count'" in told[0]
    )
    assert "parameter 'unheard_of' is not known" in told[1]


def test_string_tensors_are_completed(repeating, version_folder):
    """A tensor of strings is declared as TYPE_STRING, of variable length as -1."""
    config = BACKENDS["onnxruntime"].auto_complete({"max_batch_size": 0, "output": [{}]}, version_folder)
    assert [{"name": "flat", "data_type": "TYPE_STRING", "dims": [-1]}] == config["input"]


@pytest.mark.parametrize("location", ["../../secret.bin", "{folder}/secret.bin", "link.bin"])
def test_weights_outside_of_the_model_are_not_read(version_folder, load_onnx, location):
    """A file that says that its weights lie elsewhere, also behind a link, is a load error and reads nothing there."""
    secret = version_folder.parents[1] / "secret.bin"
    secret.write_bytes(np.ones(2, np.float32).tobytes())
    (version_folder / "link.bin").symlink_to(secret)
    weights = onnx.TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location.format(folder=secret.parent)), ("offset", "0"), ("length", "8")):
        weights.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Add", ["X", "W"], ["Y"])], "g", [_value("X", TensorProto.FLOAT, [2])],
        [_value("Y", TensorProto.FLOAT, [2])], [weights],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (version_folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InvalidArgumentError, match="External data path"):
        load_onnx({"X": ("FP32", (2,))}, {"Y": ("FP32", (2,))}, max_batch_size=0)
