"""Sessions with bound inputs and outputs. ONNX Runtime binds memory of the CPU by the same calls as that of a GPU."""

import logging

import numpy as np
import onnxruntime
import pytest
from tests.unit.backends.files import write_onnx
from tests.unit.builders import execute_batch, make_served_request

from weft.backends import BACKENDS
from weft.backends import onnxruntime as backend_module
from weft.backends.gpu import PinnedPool
from weft.backends.onnxruntime import MAX_GRAPHS, BoundOutput, BoundSession
from weft.serving.backends.base import InstanceContext
from weft.serving.config.placement import count_gpus

FP32 = np.dtype(np.float32)


class Arrays:
    """Makes arrays and remembers where."""

    def __init__(self):
        self.addresses = []

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        self.addresses.append(array.ctypes.data)
        return array


@pytest.fixture
def path(version_folder):
    """A model of rows: ``SUM`` and ``FLAGS`` of their shape, and ``POSITIVE``, whose shape depends on the values."""
    write_onnx(
        version_folder / "model.onnx",
        "model (float[n, 3] A, float[n, 3] B) => (float[n, 3] SUM, bool[n, 3] FLAGS, int64[2, k] POSITIVE)"
        " { SUM = Add(A, B) FLAGS = Greater(A, B) POSITIVE = NonZero(FLAGS) }",
    )
    return version_folder / "model.onnx"


@pytest.fixture
def bind(path):
    """Makes a bound session of the model."""

    def bind(outputs, arrays, **options):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return BoundSession(onnxruntime, session, ("cpu", 0), outputs, has_rows=True, allocate=arrays.empty, **options)

    return bind


FIXED = {"FLAGS": BoundOutput(np.dtype(np.bool_), (3,)), "SUM": BoundOutput(FP32, (3,))}
VARYING = {"POSITIVE": BoundOutput(np.dtype(np.int64), None)}


def inputs_of(num_rows, seed=0):
    """Inputs of so many rows."""
    a, b = np.random.default_rng(seed).normal(size=(2, num_rows, 3)).astype(np.float32)
    return {"A": a, "B": b}


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("outputs", [FIXED, VARYING, {**VARYING, **FIXED}])
def test_outputs_are_those_of_the_session(bind, outputs, captures):
    """Outputs of known shape lie where they were asked to; others come too, whatever the order."""
    arrays = Arrays()
    bound = bind(outputs, arrays, captures=captures)
    kept = []
    for seed, num_rows in enumerate([1, 4, 2, 4, 4]):
        inputs = inputs_of(num_rows, seed)
        kept.append((inputs, bound.run(inputs, num_rows)))
    for inputs, answer in kept:  # all of them at the end, so that none shares memory with a later one
        assert list(outputs) == list(answer)
        if "SUM" in answer:
            np.testing.assert_array_equal(inputs["A"] + inputs["B"], answer["SUM"])
            np.testing.assert_array_equal(inputs["A"] > inputs["B"], answer["FLAGS"])
        if "POSITIVE" in answer:
            np.testing.assert_array_equal(np.nonzero(inputs["A"] > inputs["B"]), answer["POSITIVE"])
    is_placed = not captures or "POSITIVE" in outputs
    assert (10 if is_placed and "SUM" in outputs else 0) == len(arrays.addresses)


def test_each_set_of_shapes_is_captured_once(bind):
    """A shape that was there before takes its tensors again; those beyond the limit run without being captured."""
    arrays = Arrays()
    bound = bind(FIXED, arrays, captures=True)
    for num_rows in [*range(1, MAX_GRAPHS + 3), 1, 2]:
        inputs = inputs_of(num_rows)
        np.testing.assert_array_equal(inputs["A"] + inputs["B"], bound.run(inputs, num_rows)["SUM"])
    assert (MAX_GRAPHS, 4) == (len(bound._captured), len(arrays.addresses))


def test_an_output_of_another_shape_than_declared_is_an_error(bind):
    """Nothing is written beyond an array that is too small."""
    bound = bind({"SUM": BoundOutput(FP32, (2,))}, Arrays())
    with pytest.raises(Exception, match=r"(?i)shape|dimension"):
        bound.run(inputs_of(4), 4)
    assert (4, 3) == bind(FIXED, Arrays()).run(inputs_of(4), 4)["SUM"].shape


@pytest.fixture
def load_bound(path, make_model_context, monkeypatch):
    """Makes a loaded backend that runs as on a GPU, but on the CPU; its pool counts the blocks that it makes."""

    def load(config=None, outputs=None):
        made = []

        def allocate(num_bytes):
            made.append(np.empty(num_bytes, np.uint8))
            return made[-1].ctypes.data

        monkeypatch.setattr(backend_module, "make_pinned_pool", lambda instance: PinnedPool(allocate, lambda _: None))
        model = make_model_context(
            {"A": ("FP32", (3,)), "B": ("FP32", (3,))}, outputs or {"SUM": ("FP32", (3,))}, config=config or {}
        )
        backend = BACKENDS["onnxruntime"](model, InstanceContext("model_0_0"))
        backend.load()
        backend._bind(onnxruntime, model.signature, ("cpu", 0))  # type: ignore[attr-defined]
        return backend, made

    return load


def test_requests_of_a_batch_through_pinned_memory(load_bound):
    """Rows are gathered into memory of the pool, come back apart, and later batches need no more memory."""
    backend, made = load_bound()
    for round_ in range(5):
        cases = [inputs_of(n, round_) for n in (1, 3, 2)]
        outcomes = execute_batch(backend, *(make_served_request(**case) for case in cases))
        for case, outcome in zip(cases, outcomes, strict=True):
            np.testing.assert_array_equal(case["A"] + case["B"], outcome.outputs["SUM"])
        (alone,) = execute_batch(backend, make_served_request(**cases[0]))
        np.testing.assert_array_equal(cases[0]["A"] + cases[0]["B"], alone.outputs["SUM"])
        del outcome, outcomes, alone
    assert len(made) <= 4
    backend.close()


@pytest.mark.parametrize(("way", "num_blocks"), [("input", 1), ("output", 2)])
def test_pinned_memory_can_be_declined(load_bound, way, num_blocks):
    """``optimization`` takes either way out of pinned memory."""
    backend, made = load_bound({"optimization": {f"{way}_pinned_memory": {}}})
    (outcome,) = execute_batch(backend, make_served_request(**inputs_of(2)))
    assert ((2, 3), num_blocks) == (outcome.outputs["SUM"].shape, len(made))


def test_outputs_outlive_the_backend(load_bound):
    """An answer may be read after the instance was closed."""
    backend, _ = load_bound()
    case = inputs_of(2)
    (outcome,) = execute_batch(backend, make_served_request(**case))
    backend.close()
    np.testing.assert_array_equal(case["A"] + case["B"], outcome.outputs["SUM"])


@pytest.mark.parametrize(
    ("optimization", "captures"),
    [
        ({}, False),
        ({"cuda": {"graphs": True}}, True),
        ({"cuda": {}}, False),
        (
            {
                "execution_accelerators": {
                    "gpu_execution_accelerator": [{"name": "cuda", "parameters": {"enable_cuda_graph": "1"}}]
                }
            },
            True,
        ),
    ],
)
def test_cuda_graphs_are_asked_for_in_the_configuration(path, make_model_context, optimization, captures):
    """Either field asks ONNX Runtime for CUDA graphs; the accelerator's parameters go to the provider."""
    model = make_model_context({"A": ("FP32", (3,))}, {}, config={"optimization": optimization})
    backend = BACKENDS["onnxruntime"](model, InstanceContext("model_0_0", "GPU", 1))
    (_, options), cpu = backend._providers()  # type: ignore[attr-defined]
    assert ("1" if captures else None, "1", "CPUExecutionProvider") == (
        options.get("enable_cuda_graph"),
        options["device_id"],
        cpu,
    )
    assert captures == backend._captures  # type: ignore[attr-defined]


def test_graphs_that_cannot_be_are_told(load_bound, caplog):
    """With an output of varying shape the model runs without graphs, and the log says which."""
    with caplog.at_level(logging.WARNING, "weft.model"):
        backend, _ = load_bound(
            {"optimization": {"cuda": {"graphs": True}}}, {"SUM": ("FP32", (3,)), "FLAGS": ("BOOL", (-1,))}
        )
    (outcome,) = execute_batch(backend, make_served_request(**inputs_of(2)))
    assert (2, 3) == outcome.outputs["FLAGS"].shape
    assert "'model' runs without CUDA graphs, which need outputs of fixed dims: 'FLAGS' has none" in caplog.text


def test_an_automatic_instance_goes_on_on_the_cpu(path, make_model_context, caplog):
    """Where CUDA does not load, an instance of KIND_AUTO answers from the CPU, and the log says why."""
    cuda = "CUDAExecutionProvider"
    is_built_for_it = cuda in onnxruntime.get_available_providers()
    if is_built_for_it and cuda in onnxruntime.InferenceSession(str(path), providers=[cuda]).get_providers():
        pytest.skip("needs a machine on which CUDA does not load")
    model = make_model_context({"A": ("FP32", (3,)), "B": ("FP32", (3,))}, {"SUM": ("FP32", (3,))})
    backend = BACKENDS["onnxruntime"](model, InstanceContext("model_0_0", "GPU", may_use_cpu=True))
    with caplog.at_level(logging.WARNING, "weft.model"):
        backend.load()
    case = inputs_of(2)
    (outcome,) = execute_batch(backend, make_served_request(**case))
    np.testing.assert_array_equal(case["A"] + case["B"], outcome.outputs["SUM"])
    assert "instance 'model_0_0' of KIND_AUTO runs on the CPU, although there is a GPU: ONNX Runtime" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU")
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_from_a_gpu(path, make_model_context, graphs):
    """Pinned inputs and outputs, and captured graphs, give the numbers of the CPU, and answers stay as they were."""
    model = make_model_context(
        {"A": ("FP32", (3,)), "B": ("FP32", (3,))},
        {"SUM": ("FP32", (3,))},
        config={"optimization": {"cuda": {"graphs": graphs}}},
    )
    backend = BACKENDS["onnxruntime"](model, InstanceContext("model_0_0", "GPU"))
    backend.load()
    cases = [inputs_of(n, seed) for seed, n in enumerate((1, 4, 2, 4, 4, 1))]
    answers = [execute_batch(backend, make_served_request(**case))[0] for case in cases]
    for case, answer in zip(cases, answers, strict=True):
        np.testing.assert_array_equal(case["A"] + case["B"], answer.outputs["SUM"])
    assert backend._pool is not None  # type: ignore[attr-defined]
    backend.close()
