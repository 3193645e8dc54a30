"""``reshape``: what clients see, and what the model gets and gives."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, decode, encode, reshaped
from weft.base.text.pbtxt import parse
from weft.serving.backends.base import Batch, RowBackend, TensorBackend, check_finite, check_rows
from weft.serving.config import define_model
from weft.serving.runtime.model import SequenceModel, ServedModel, call_reshaper
from weft_protos.model_config_pb2 import ModelConfig

CONFIG = """\
backend: "shapes"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 1 ] reshape { shape: [ ] } }
"""


class Shapes(TensorBackend):
    """Y is X, in the shape that it came in; the class notes the shapes."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012  # of the class on purpose

    def load(self):
        """Nothing to load."""

    def run(self, inputs, num_rows):
        """Y = X."""
        self.seen.append(inputs["X"].shape)
        return {"Y": inputs["X"]}


@pytest.fixture
async def make_model():
    """Starts the only version of a definition; it is stopped after the test."""
    Shapes.seen.clear()
    models = []

    async def make(definition):
        kind = ServedModel if definition.settings.sequences is None else SequenceModel
        (context,) = definition.contexts.values()
        model = kind(context, definition.backend, definition.settings, definition.instances)
        await model.start()
        models.append(model)
        return model

    yield make
    for model in models:
        await model.stop(grace_s=5)


@pytest.mark.parametrize(
    ("shape", "source", "target", "expected"),
    [
        ((3, 1), (1,), (), (3,)),
        ((3,), (), (1, 1), (3, 1, 1)),
        ((5, 7), (-1, -1), (-1, 1, -1), (5, 1, 7)),
        ((2, 0, 4), (-1, 4), (2, -1, 2), (2, 2, 0, 2)),
        ((4,), (4,), (2, 2), (2, 2)),
    ],
)
def test_sizes_keep_their_order(shape, source, target, expected):
    """Variable sizes go to the -1 of the other dims in order, and the batch dimension stays."""
    assert expected == reshaped(shape, source, target)


def test_reshaping_copies_nothing():
    """A call in the model's shapes has the bytes of the client's, which keeps its own; others are left alone."""
    spec = TensorSpec("X", "FP32", (4,), reshape=(2, 2))
    signature = ModelSignature("m", "1", "", 8, (spec, TensorSpec("O", "FP32", (1,), is_optional=True)), (spec,))
    call = InferCall("m", inputs={"X": WireTensor("FP32", (1, 4), bytes(16))})
    made = call_reshaper(signature)(call)
    assert ((1, 2, 2), (1, 4)) == (made.inputs["X"].shape, call.inputs["X"].shape)
    assert made.inputs["X"].data is call.inputs["X"].data
    assert ((2, 2), None) == (signature.for_backend().inputs[0].dims, signature.for_backend().inputs[0].reshape)
    plain = replace(signature, inputs=(), outputs=())
    assert call_reshaper(plain) is None
    assert plain.for_backend() is plain


def _defined(tmp_path, text):
    directory = tmp_path / "m"
    directory.mkdir(exist_ok=True)
    (directory / "config.pbtxt").write_text(text)
    return define_model(directory, (1,), {"shapes": Shapes}, num_gpus=0)


def test_clients_and_model_have_dims_of_their_own(tmp_path):
    """The signature for clients has ``dims``, and compares equal to one without reshape."""
    (context,) = _defined(tmp_path, CONFIG).contexts.values()
    signature = context.signature
    assert [(1,), (1, 1)] == [signature.inputs[0].dims, signature.outputs[0].dims]
    assert [(), ()] == [signature.for_backend().inputs[0].dims, signature.for_backend().outputs[0].dims]
    config = parse(CONFIG.replace("reshape { shape: [ ] }", "").encode(), ModelConfig(), file="")[0]
    assert ModelSignature.from_config(config, "1").inputs == signature.inputs


async def test_rows_of_scalars_share_a_batch(tmp_path, make_model):
    """Two requests with dims [1] and an empty reshape are one batch ``[rows]``; each gets its rows as [1, 1]."""
    model = await make_model(_defined(tmp_path, CONFIG + "dynamic_batching { }"))
    calls = [InferCall("m", inputs={"X": encode(np.full((rows, 1), rows, np.float32))}) for rows in (1, 2)]
    results = await asyncio.gather(*(model.infer(call, CallContext()) for call in calls))
    assert [(3,)] == Shapes.seen
    assert [[[[1]]], [[[2]], [[2]]]] == [decode(result.outputs["Y"]).tolist() for result in results]
    with pytest.raises(InvalidArgumentError, match=r"Expected \[-1,1\], got \[2\]"):
        await model.infer(InferCall("m", inputs={"X": encode(np.ones(2, np.float32))}), CallContext())


async def test_parts_of_a_large_request_are_reshaped(tmp_path, make_model):
    """A request above max_batch_size runs in parts with the model's shape and is joined with the client's."""
    split = 'parameters { key: "split_large_requests" value { string_value: "true" } }'
    model = await make_model(_defined(tmp_path, CONFIG + split))
    numbers = np.arange(20, dtype=np.float32).reshape(20, 1)
    result = await model.infer(InferCall("m", inputs={"X": encode(numbers)}), CallContext())
    assert [(8,), (8,), (4,)] == Shapes.seen
    assert numbers.reshape(20, 1, 1).tolist() == decode(result.outputs["Y"]).tolist()


async def test_warm_up_is_in_the_shape_of_clients(tmp_path, make_model):
    """``model_warmup`` names the client's dims, and the model gets its own."""
    warmup = 'inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }'
    await make_model(_defined(tmp_path, CONFIG + f"model_warmup {{ batch_size: 4 {warmup} }}"))
    assert [(4,)] == Shapes.seen


async def test_ragged_pieces_are_reshaped(tmp_path, make_model):
    """A ragged input is one dimension for the model; what is cut by its shape leaves with the dims of clients."""
    text = CONFIG.replace("dims: [ 1 ] reshape { shape: [ ] }", "dims: [ -1 ] reshape { shape: [ -1, 1 ] }")
    text = text.replace("dims: [ 1, 1 ] reshape { shape: [ ] }", "dims: [ 1, -1 ] reshape { shape: [ -1, 1 ] }")
    text = text.replace("reshape { shape: [ -1, 1 ] } }", "reshape { shape: [ -1, 1 ] } allow_ragged_batch: true }", 1)
    text += 'batch_output { target_name: "Y" source_input: "X" } dynamic_batching { }'
    model = await make_model(_defined(tmp_path, text))
    calls = [InferCall("m", inputs={"X": encode(np.full((1, size), size, np.float32))}) for size in (2, 3)]
    results = await asyncio.gather(*(model.infer(call, CallContext()) for call in calls))
    assert [(5,)] == Shapes.seen
    assert [[[[2, 2]]], [[[3, 3, 3]]]] == [decode(result.outputs["Y"]).tolist() for result in results]


async def test_a_state_has_the_dims_of_the_model(tmp_path, make_model):
    """Clients get a state that is an output too with the dims of the output."""
    text = CONFIG.replace("reshape { shape: [ ] }", "").replace("dims: [ 1, 1 ]", "dims: [ 1, 1 ] reshape { shape: 1 }")
    state = 'state { input_name: "S" output_name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }'
    model = await make_model(_defined(tmp_path, f"{text} sequence_batching {{ {state} }}"))
    call = InferCall("m", inputs={"X": encode(np.full((1, 1), 5, np.float32))})
    call.parameters = {"sequence_id": 1, "sequence_start": True}
    result = await model.infer(call, CallContext())
    assert [[[5]]] == decode(result.outputs["Y"]).tolist()


class _Doubling(RowBackend):
    """Doubles X, notes every batch that it sees, and refuses numbers that are not finite."""

    def load(self):
        self.seen = []

    def run(self, inputs, num_rows):
        self.seen.append(inputs["X"].shape)
        check_finite(inputs["X"], "X")
        return {"Y": inputs["X"] * 2}


@pytest.fixture
def doubling(make_model_context):
    """Makes a loaded backend."""

    def make(**options):
        return load_backend(_Doubling, make_model_context({"X": ("FP32", (2,))}, {"Y": ("FP32", (2,))}, **options))

    return make


def _rows(*values):
    return np.array(values, np.float32)


def test_requests_are_run_together(doubling):
    """A batch of sound requests is one run, and each gets its own rows."""
    backend = doubling()
    outcomes = execute_batch(
        backend, make_served_request(X=_rows([1, 2])), make_served_request(X=_rows([3, 4], [5, 6]))
    )
    assert [[[2, 4]], [[6, 8], [10, 12]]] == [outcome.outputs["Y"].tolist() for outcome in outcomes]
    assert [(3, 2)] == backend.seen


def test_bad_data_cost_the_batch_mates_nothing(doubling):
    """A bad row fails its own request with its own number there; all others are answered."""
    requests = [make_served_request(X=_rows([i, i])) for i in range(3)]
    bad = make_served_request(X=_rows([0, 0], [1, np.inf]))
    outcomes = execute_batch(doubling(), *requests[:2], bad, requests[2])
    assert isinstance(outcomes[2], InvalidArgumentError)
    assert "input 'X' row 1: inf at [1]; numbers must be finite" == outcomes[2].message
    assert [[[0, 0]], [[2, 2]], [[4, 4]]] == [outcomes[i].outputs["Y"].tolist() for i in (0, 1, 3)]


def test_absent_input_fails_its_own_request(doubling):
    """An input that the configuration calls optional, but the backend needs, is INVALID_ARGUMENT where it is absent."""
    present, absent = execute_batch(
        doubling(optional=("X",)), make_served_request(X=_rows([1, 2])), make_served_request()
    )
    assert [[2, 4]] == present.outputs["Y"].tolist()
    assert "input 'X' is missing; this model needs it in every request" == absent.message


def test_times_of_the_runs_stay_in_order(doubling):
    """Also after bad data a batch has the times of its execution."""
    batch = Batch([make_served_request(X=_rows([1, value])) for value in (1, np.nan)])
    doubling().execute(batch)
    assert 0 < batch.start_ns <= batch.infer_start_ns <= batch.infer_end_ns


def test_model_without_batch_dimension_has_one_row(doubling):
    """With max_batch_size 0 the backend sees one row, and the answer has no batch dimension."""
    backend = doubling(max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(X=np.array([1, 2], np.float32)))
    assert ([2, 4], [(1, 2)]) == (outcome.outputs["Y"].tolist(), backend.seen)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2)])
def test_first_bad_row_is_named(shape):
    """The first row that has anything bad is named, whatever the number of dimensions."""
    is_good = np.ones(shape, np.bool_)
    check_rows(is_good, "X", lambda row: "never asked")
    is_good[1:] = False
    with pytest.raises(InvalidArgumentError, match=r"^input 'X' row 1: number 1 is odd$"):
        check_rows(is_good, "X", lambda row: f"number {row} is odd")
