"""The ``pytorch`` backend against modules exported here."""

import io
import json
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends import BACKENDS
from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.serving.backends.base import InstanceContext
from weft.serving.config.placement import count_gpus

INPUTS = {"x": ("FP32", (3,)), "y": ("FP32", (3,))}
OUTPUTS = {"total": ("FP32", (3,)), "difference": ("FP32", (3,))}


class Named(torch.nn.Module):
    """Answers a dict."""

    def forward(self, x, y):
        return {"total": x + y, "difference": x - y}


class Unnamed(torch.nn.Module):
    """Answers a tuple."""

    def forward(self, x, y):
        return x + y, x - y


class Linear(torch.nn.Module):
    """Has weights, and answers a tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 5)

    def forward(self, x):
        return torch.relu(self.layer(x))


@pytest.fixture
def export(version_folder):
    """Exports a module with a dynamic first dimension and writes ``model.pt2``."""

    def export(module, *arguments, dynamic=None, **keywords):
        shapes = {0: torch.export.Dim("batch")} if dynamic is None else dynamic
        # One tensor given twice would be exported as one input.
        arguments = tuple(argument.clone() for argument in arguments)
        keywords = {name: argument.clone() for name, argument in keywords.items()}
        dynamic_shapes = dict.fromkeys(keywords, shapes) if keywords else (shapes,) * len(arguments)
        program = torch.export.export(module.eval(), arguments, keywords, dynamic_shapes=dynamic_shapes)
        torch.export.save(program, version_folder / "model.pt2")
        return version_folder / "model.pt2"

    return export


@pytest.fixture
def load_pytorch(make_model_context):
    """Makes a loaded backend."""

    def load(inputs=INPUTS, outputs=OUTPUTS, **options):
        return load_backend(BACKENDS["pytorch"], make_model_context(inputs, outputs, **options))

    return load


ONES = torch.ones(2, 3)


def test_requests_of_a_batch_get_their_own_rows(export, load_pytorch):
    """Outputs of each request equal the module's, a single row among them."""
    export(Linear(), ONES)
    random = np.random.default_rng(0)
    cases = [random.normal(size=(n, 3)).astype(np.float32) for n in (1, 3, 2)]
    backend = load_pytorch({"x": ("FP32", (3,))}, {"answer": ("FP32", (5,))})
    module = Linear().eval()
    outcomes = execute_batch(backend, *(make_served_request(x=x) for x in cases)) + execute_batch(
        backend, make_served_request(x=cases[0])
    )
    for outcome, x in zip(outcomes, [*cases, cases[0]], strict=True):
        expected = module(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(outcome.outputs["answer"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "inputs", "outputs"),
    [
        (Named(), {"y": 2.0, "x": 5.0}, {"difference": 3.0, "total": 7.0}),
        (Unnamed(), {"IN__1": 2.0, "IN__0": 5.0}, {"OUT__1": 3.0, "OUT__0": 7.0}),
        (Unnamed(), {"a": 5.0, "b": 2.0}, {"s": 7.0, "d": 3.0}),
        (Unnamed(), {"a": 5.0, "IN__0": 2.0}, {"OUT__7": 7.0, "OUT__0": 3.0}),
    ],
)
def test_tensors_are_matched(export, load_pytorch, module, inputs, outputs):
    """Names of the module come first, then numbers in all the names, then the declared order."""
    export(module, ONES, ONES)
    backend = load_pytorch(dict.fromkeys(inputs, ("FP32", (3,))), dict.fromkeys(outputs, ("FP32", (3,))))
    arrays = {name: np.full((1, 3), value, np.float32) for name, value in inputs.items()}
    (outcome,) = execute_batch(backend, make_served_request(**arrays))  # type: ignore[arg-type]
    assert outputs == {name: array[0, 0] for name, array in outcome.outputs.items()}


def test_a_single_output_may_be_asked_for(export, load_pytorch):
    """The configuration may leave outputs of the module out."""
    export(Unnamed(), ONES, ONES)
    backend = load_pytorch(outputs={"OUTPUT__1": ("FP32", (3,))})
    ones = np.ones((1, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(x=ones * 4, y=ones))
    assert {"OUTPUT__1": [[3.0] * 3]} == {name: array.tolist() for name, array in outcome.outputs.items()}


def test_keyword_arguments_are_passed_by_name(export, load_pytorch):
    """A module that was exported with keyword arguments gets them as such."""
    export(Unnamed(), x=ONES, y=ONES)
    backend = load_pytorch(outputs={"a": ("FP32", (3,)), "b": ("FP32", (3,))})
    ones = np.ones((1, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(y=ones, x=ones * 4))
    assert [5.0, 3.0] == [outcome.outputs[name][0, 0] for name in ("a", "b")]


def test_arguments_may_have_the_names_of_builtins(export, load_pytorch):
    """Arguments such as ``input`` and ``max`` are matched by their own names."""

    class Builtins(torch.nn.Module):
        def forward(self, input, max):
            return input - max

    export(Builtins(), ONES, ONES)
    backend = load_pytorch({"max": ("FP32", (3,)), "input": ("FP32", (3,))}, {"d": ("FP32", (3,))})
    ones = np.ones((1, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(max=ones, input=ones * 4))
    assert 3.0 == outcome.outputs["d"][0, 0]


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [("BF16", ml_dtypes.bfloat16), ("FP16", np.float16), ("INT64", np.int64), ("UINT8", np.uint8), ("BOOL", np.bool_)],
)
def test_datatypes_pass_unchanged(export, load_pytorch, datatype, dtype):
    """Each datatype, bfloat16 by its bits, goes through a module that only copies."""

    class Copy(torch.nn.Module):
        def forward(self, x):
            return x.clone()

    example = torch.zeros(
        2, 3, dtype=torch.bfloat16 if datatype == "BF16" else torch.from_numpy(np.zeros(1, dtype)).dtype
    )
    export(Copy(), example)
    backend = load_pytorch({"x": (datatype, (3,))}, {"y": (datatype, (3,))})
    array = np.array([[0, 1, 3]]).astype(dtype)
    (outcome,) = execute_batch(backend, make_served_request(x=array))
    assert array.dtype == outcome.outputs["y"].dtype
    assert array.tolist() == outcome.outputs["y"].tolist()


def test_shapes_beyond_the_export_fail_the_request(export, load_pytorch):
    """A length over the exported range is INVALID_ARGUMENT with the limit."""
    length = torch.export.Dim("length", max=16)
    export(Unnamed(), ONES, ONES, dynamic={0: torch.export.Dim("batch"), 1: length})
    backend = load_pytorch(dict.fromkeys(INPUTS, ("FP32", (-1,))), dict.fromkeys(("a", "b"), ("FP32", (-1,))))
    good, bad = np.ones((1, 16), np.float32), np.ones((1, 17), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(x=good, y=good))
    assert (1, 16) == outcome.outputs["a"].shape
    with pytest.raises(InvalidArgumentError, match="<= 16"):
        execute_batch(backend, make_served_request(x=bad, y=bad))


def test_threads_are_those_that_a_model_asks_for(export, load_pytorch):
    """One thread unless a model asks for more; a later model that does not ask leaves it so."""
    export(Unnamed(), ONES, ONES)
    outputs = {"a": ("FP32", (3,)), "b": ("FP32", (3,))}
    counts = []
    before = torch.get_num_threads()
    try:
        for parameters in ({}, {"INTRA_OP_THREAD_COUNT": "2"}, {}, {"INTRA_OP_THREAD_COUNT": "1"}):
            load_pytorch(outputs=outputs, **parameters)
            counts.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert [1, 2, 2, 1] == counts


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "message"),
    [
        ({"x": INPUTS["x"]}, OUTPUTS, {}, "takes 2 inputs (x, y), the configuration declares 1"),
        ({**INPUTS, "x": ("FP64", (3,))}, OUTPUTS, {}, "input 'x' is FP64 [-1, 3] by the configuration"),
        ({**INPUTS, "x": ("FP32", (-1,))}, OUTPUTS, {}, "input 'x' is FP32 [-1, -1] by the configuration"),
        (INPUTS, {"total": ("FP32", (4,))}, {}, "output 'total' is FP32 [-1, 4] by the configuration"),
        (INPUTS, dict.fromkeys("abc", ("FP32", (3,))), {}, "has no output 'c'; it has 'a', 'b'"),
        (INPUTS, OUTPUTS, {"optional": ("y",)}, "input 'y' is optional in the configuration"),
        (INPUTS, OUTPUTS, {"INTRA_OP_THREADS": "1"}, "unknown parameter 'INTRA_OP_THREADS'; did you mean"),
        (INPUTS, OUTPUTS, {"config": {"default_model_filename": "model.pt"}}, "only .pt2 files are loaded"),
    ],
)
def test_configuration_that_differs_from_the_program_is_a_load_error(
    export, load_pytorch, inputs, outputs, options, message
):
    """The error has what the configuration says and what the program says."""
    export(Named(), ONES, ONES).with_suffix(".pt").touch()
    with pytest.raises(InvalidArgumentError) as error:
        load_pytorch(inputs, outputs, **options)
    assert message in error.value.message


def test_fixed_batch_dimension_cannot_be_batched(export, load_pytorch):
    """A program exported for one batch size is refused with max_batch_size above 0."""
    export(Named(), ONES, ONES, dynamic={})
    with pytest.raises(InvalidArgumentError, match=r"but FP32 \[2, 3\] in"):
        load_pytorch()


def test_batches_over_the_exported_range_are_refused(export, load_pytorch):
    """A max_batch_size over the range of the export is a load error with both numbers."""
    export(Named(), ONES, ONES, dynamic={0: torch.export.Dim("batch", max=4)})
    with pytest.raises(InvalidArgumentError, match=r"max_batch_size is 8, but .* exported for batches of at most 4"):
        load_pytorch()


_WEIGHTS = "data/weights/model_weights_config.json"


def _rewritten(path, change):
    """The archive with records changed: ``change`` gets and returns ``{name below the root: bytes}``."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(records)).partition("/")[0]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in change({name.removeprefix(f"{root}/"): data for name, data in records.items()}).items():
            archive.writestr(f"{root}/{name}", data)


class _Payload:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("the archive was unpickled",))


def _pickled_weight(records):
    config = json.loads(records[_WEIGHTS])
    config["config"]["layer.weight"]["use_pickle"] = True
    return records | {_WEIGHTS: json.dumps(config).encode(), "data/weights/weight_0": pickle.dumps(_Payload())}


def _opaque_constant(records):
    config = {
        "config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False, "tensor_meta": None}}
    }
    return records | {
        "data/constants/model_constants_config.json": json.dumps(config).encode(),
        "data/constants/opaque_obj_0": pickle.dumps(_Payload()),
    }


def _pickled_samples(records):
    buffer = io.BytesIO()
    torch.save(_Payload(), buffer)
    return records | {"data/sample_inputs/model.pt": buffer.getvalue()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_pickled_weight, "'layer.weight' is pickled, and pickles are not loaded"),
        (_opaque_constant, "'c' is pickled, and pickles are not loaded"),
        (_pickled_samples, "the sample inputs are pickled objects, not tensors"),
        (lambda records: records | {"data/weights/model.pt": b""}, "holds 'data/weights/model.pt', which torch would"),
        (lambda records: records | {"models/other.json": b"{}"}, "holds 'models/other.json'"),
        (lambda records: records | {"data/aotinductor/model/a.so": b""}, "holds native code of AOTInductor"),
        (lambda records: records | {"archive_format": b"pt3"}, "is not an archive of torch.export.save"),
        (lambda records: records | {"models/model.json": b"{}"}, "its program cannot be read"),
        (lambda records: records | {_WEIGHTS: b"{"}, "its program cannot be read: JSONDecodeError"),
        (lambda records: records | {_WEIGHTS: b"[]"}, "its program cannot be read: TypeError"),
        (lambda records: {name: records[name] for name in records if name != "archive_format"}, "is not an archive"),
    ],
)
def test_archive_that_would_run_code_is_refused(export, load_pytorch, change, message):
    """Pickles and native code inside a .pt2 are refused before torch opens them."""
    _rewritten(export(Linear(), ONES), change)
    with pytest.raises(InvalidArgumentError) as error:
        load_pytorch({"x": ("FP32", (3,))}, {"answer": ("FP32", (5,))})
    assert message in error.value.message


def test_archive_written_anew_still_loads(export, load_pytorch):
    """An archive whose records are unchanged loads, so the refusals above are due to what was changed."""
    _rewritten(export(Linear(), ONES), lambda records: records)
    load_pytorch({"x": ("FP32", (3,))}, {"answer": ("FP32", (5,))})


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), pickle.dumps(_Payload)])
def test_file_that_is_no_archive_is_refused(version_folder, load_pytorch, content):
    """An empty file, an empty zip and a pickle are no archives."""
    (version_folder / "model.pt2").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"is not an archive of torch.export.save; export the model"):
        load_pytorch()


def test_torchscript_is_refused(version_folder, load_pytorch):
    """A TorchScript file is refused, also under the right name."""
    with pytest.warns(DeprecationWarning, match=r"torch.jit"):
        torch.jit.script(Unnamed()).save(str(version_folder / "model.pt2"))
    with pytest.raises(InvalidArgumentError, match=r"is not an archive of torch.export.save"):
        load_pytorch()


@pytest.mark.skipif(count_gpus() > 0, reason="needs a machine without a GPU")
def test_gpu_instance_needs_a_gpu(export, make_model_context):
    """Where torch sees no CUDA device, a GPU instance is an error with the cure."""
    export(Named(), ONES, ONES)
    backend = BACKENDS["pytorch"](make_model_context(INPUTS, OUTPUTS), InstanceContext("model_0_0", kind="GPU"))
    with pytest.raises(UnavailableError, match=r"asks for GPU 0, but torch .* sees 0 CUDA devices"):
        backend.load()


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU")
def test_gpu_instance_runs_on_cuda(export, make_model_context):
    """A GPU instance computes on its device and answers from host memory."""
    export(Linear(), ONES)
    model = make_model_context({"x": ("FP32", (3,))}, {"answer": ("FP32", (5,))})
    backend = BACKENDS["pytorch"](model, InstanceContext("model_0_0", kind="GPU"))
    backend.load()
    x = np.ones((4, 3), np.float32)
    (outcome,) = execute_batch(backend, make_served_request(x=x))
    expected = Linear()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(outcome.outputs["answer"], expected, rtol=1e-3, atol=1e-4)
