"""How the ``pytorch`` backend stages, casts, lays out and compiles, on the CPU as far as that is the same code."""

import logging
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends import BACKENDS
from weft.backends.pytorch import TorchDevice
from weft.base.errors import InvalidArgumentError
from weft.serving.backends.base import InstanceContext
from weft.serving.config.placement import count_gpus


class Net(torch.nn.Module):
    """A convolution, a layer, and a conversion of types as exported programs have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.layer = torch.nn.Linear(4 * 4 * 4, 5)

    def forward(self, x):
        return torch.relu(self.layer(self.conv(x).flatten(1))).to(torch.float32)


class Twice(torch.nn.Module):
    """Of any length up to 16."""

    def forward(self, x):
        return x * 2


IMAGES = {"x": ("FP32", (3, 6, 6))}, {"y": ("FP32", (5,))}
ROWS = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}


@pytest.fixture
def write(version_folder):
    """Writes ``model.pt2`` of the images or of the rows."""

    def write(tensors):
        module, example, shapes = (
            (Net(), torch.ones(2, 3, 6, 6), {0: torch.export.Dim("rows")})
            if tensors is IMAGES
            else (Twice(), torch.ones(2, 8), {0: torch.export.Dim("rows"), 1: torch.export.Dim("length", max=16)})
        )
        program = torch.export.export(module.eval(), (example,), dynamic_shapes=(shapes,))
        torch.export.save(program, version_folder / "model.pt2")

    return write


@pytest.fixture
def load(write, make_model_context):
    """Makes a loaded backend of the images or the rows, with parameters."""

    def load(tensors=IMAGES, **options):
        write(tensors)
        return load_backend(BACKENDS["pytorch"], make_model_context(*tensors, **options))

    return load


def images(num_rows, seed=0):
    """Images of so many rows."""
    return np.random.default_rng(seed).normal(size=(num_rows, 3, 6, 6)).astype(np.float32)


def expected(x):
    """What the module itself gives."""
    return Net().eval()(torch.from_numpy(x)).detach().numpy()


@pytest.mark.parametrize(
    ("parameters", "tolerance"),
    [
        ({}, 1e-6),
        ({"CHANNELS_LAST": "true"}, 1e-5),
        ({"AUTOCAST": "bf16"}, 5e-2),
        ({"TORCH_COMPILE": "eager"}, 1e-6),
        ({"TORCH_COMPILE": "eager", "CHANNELS_LAST": "true", "AUTOCAST": "bf16"}, 5e-2),
    ],
)
def test_options_do_not_change_answers(load, parameters, tolerance):
    """Every request gets its rows, of the exported type, through staged arrays; lower precision is close, not equal."""
    backend = load(**parameters)
    backend.gather_into(backend._device.empty)
    cases = [images(n, n) for n in (1, 3, 2)]
    for outcome, x in zip(execute_batch(backend, *(make_served_request(x=x) for x in cases)), cases, strict=True):
        assert (np.float32, (len(x), 5)) == (outcome.outputs["y"].dtype, outcome.outputs["y"].shape)
        np.testing.assert_allclose(outcome.outputs["y"], expected(x), rtol=tolerance, atol=tolerance)
        if "AUTOCAST" in parameters:
            assert np.abs(outcome.outputs["y"] - expected(x)).max() > 1e-6


def test_channels_last_reaches_weights_and_inputs(load):
    """Both are laid out as NHWC."""
    backend = load(CHANNELS_LAST="1")
    assert backend._device.to_device(images(2)).is_contiguous(memory_format=torch.channels_last)
    weight = backend._module.get_parameter("conv.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_compiled_batches_have_few_shapes(load, monkeypatch):
    """Rows are filled up to a power of two or the largest batch, and cut off again."""
    backend = load(max_batch_size=6, TORCH_COMPILE="eager")
    seen, module = [], backend._module
    monkeypatch.setattr(backend, "_module", lambda x: seen.append(len(x)) or module(x))
    for n in range(1, 7):
        (outcome,) = execute_batch(backend, make_served_request(x=images(n)))
        np.testing.assert_allclose(outcome.outputs["y"], expected(images(n)), rtol=1e-5, atol=1e-5)
    assert [1, 2, 4, 4, 6, 6] == seen


@pytest.mark.parametrize("compiler", ["none", "eager"])
def test_shapes_beyond_the_export_are_the_clients_fault(load, compiler):
    """Also where the program is compiled, a length that it does not take is INVALID_ARGUMENT, and others go on."""
    backend = load(ROWS, TORCH_COMPILE=compiler)
    with pytest.raises(InvalidArgumentError, match="16"):
        execute_batch(backend, make_served_request(x=np.ones((2, 17), np.float32)))
    (outcome,) = execute_batch(backend, make_served_request(x=np.ones((3, 16), np.float32)))
    assert (np.full((3, 16), 2.0)).tolist() == outcome.outputs["y"].tolist()


@pytest.mark.parametrize(
    "parameters",
    [{"AUTOCAST": "fp8"}, {"TORCH_COMPILE": "fast"}, {"CHANNELS_LAST": "yes"}],
    ids=lambda p: next(iter(p)),
)
def test_unknown_options_are_load_errors(load, parameters):
    """The error names the parameter and what it may be."""
    with pytest.raises(InvalidArgumentError, match=rf"parameter '{next(iter(parameters))}' must be .*, got"):
        load(**parameters)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5)])
def test_staged_arrays_go_there_and_back(shape, dtype):
    """An array of each type and shape comes back as it was, empty ones and scalars too."""
    device = TorchDevice(torch, torch.device("cpu"), is_channels_last=False)
    array = device.empty(shape, np.dtype(dtype))
    array[...] = np.ones(shape, dtype)
    with device.running():
        host = device.to_host(device.to_device(array))
    back = device.to_numpy(host)
    assert (shape, np.dtype(dtype)) == (back.shape, back.dtype)
    assert (back == np.ones(shape, dtype)).all()


class Recorded:
    """A ``torch``, its ``cuda`` and their one stream, which write down what is asked of them."""

    def __init__(self):
        self.events = []
        self.cuda = self

    def Stream(self, device):  # noqa: N802  # torch's name
        return self

    def wait_stream(self, other):
        self.events.append(("wait for", other))

    def synchronize(self):
        self.events.append("synchronize")

    def current_stream(self, device):
        return "default"

    @contextmanager
    def stream(self, stream):
        self.events.append("enter")
        yield
        self.events.append("leave")


def test_a_gpu_instance_waits_for_its_own_stream():
    """The stream begins after the weights are there, and has done everything before it is left."""
    recorded = Recorded()
    device = TorchDevice(recorded, torch.device("cuda"), is_channels_last=False)
    with device.running():
        recorded.events.append("run")
    assert [("wait for", "default"), "enter", "run", "synchronize", "leave"] == recorded.events


def test_a_run_that_fails_is_waited_for():
    """No copy is on its way any longer when the arrays of a batch that failed are given back."""
    recorded = Recorded()
    device = TorchDevice(recorded, torch.device("cuda"), is_channels_last=False)
    with pytest.raises(ZeroDivisionError), device.running():
        raise ZeroDivisionError
    assert "synchronize" == recorded.events[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no GPU")
def test_an_automatic_instance_goes_on_on_the_cpu(write, make_model_context, caplog):
    """Where torch sees no GPU, an instance of KIND_AUTO answers from the CPU, and the log says why."""
    write(IMAGES)
    backend = BACKENDS["pytorch"](make_model_context(*IMAGES), InstanceContext("model_0_0", "GPU", may_use_cpu=True))
    with caplog.at_level(logging.WARNING, "weft.model"):
        backend.load()
    (outcome,) = execute_batch(backend, make_served_request(x=images(2)))
    np.testing.assert_allclose(outcome.outputs["y"], expected(images(2)), rtol=1e-5, atol=1e-5)
    assert "'model_0_0' of KIND_AUTO runs on the CPU, although there is a GPU: torch" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU")
@pytest.mark.parametrize("parameters", [{}, {"CHANNELS_LAST": "true"}, {"AUTOCAST": "bf16"}])
def test_instances_on_streams_of_their_own(write, make_model_context, parameters):
    """Two instances on one GPU gather in pinned memory, and their answers stay as they were given."""
    write(IMAGES)
    model = make_model_context(*IMAGES, **parameters)
    backends = [BACKENDS["pytorch"](model, InstanceContext(f"model_0_{i}", "GPU")) for i in range(2)]
    for backend in backends:
        backend.load()
        assert torch.from_numpy(backend._device.empty((4,), np.dtype(np.float32))).is_pinned()  # type: ignore[attr-defined]
    cases = [(backend, images(n, n)) for n in (1, 3, 2) for backend in backends]
    answers = [execute_batch(backend, make_served_request(x=x))[0] for backend, x in cases]
    for (_, x), answer in zip(cases, answers, strict=True):
        np.testing.assert_allclose(answer.outputs["y"], expected(x), rtol=5e-2, atol=5e-2)
