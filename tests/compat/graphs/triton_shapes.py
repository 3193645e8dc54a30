"""Triton: steps that change what the batch dimension is, tensors that may be absent, and streams."""

from collections.abc import Iterator

import numpy as np
from tests.compat.graphs.shape import Arrays, Given, Model, Request, Shape, floats, integers

_QA = "triton-inference-server/server: qa"


def _sum(x: Arrays) -> Arrays:
    return {"SUM": x["A"] + x["B"], "DIFF": x["A"] - x["B"]}


def _same(name: str, dims: str, max_batch_size: int = 0, datatype: str = "FP32") -> Model:
    tensors = f"X:{datatype}:{dims}", f"Y:{datatype}:{dims}"
    return Model(name, *tensors, lambda x: {"Y": x["X"]}, max_batch_size)


_ROWS = Model("rows", "A:FP32:16 B:FP32:16", "SUM:FP32:16 DIFF:FP32:16", _sum, 8)
_WHOLE = _same("whole", "-1,-1")
_A, _B = (np.random.default_rng(seed).integers(0, 100, (8, 16)).astype(np.float32) for seed in (1, 2))
_EIGHT = Request({"A": _A, "B": _B}, {"SUM": _A + _B, "DIFF": _A - _B})
_THREE = Request({"A": _A[:3], "B": _B[:3]}, {"SUM": _A[:3] + _B[:3], "DIFF": _A[:3] - _B[:3]})
_SQUARES = np.arange(32, dtype=np.float32).reshape(2, 4, 4)

_BATCHES = [
    Shape(
        "triton/batches/batch_then_none.pbtxt",
        f"{_QA}/ensemble_models/batch_to_nobatch_float32_float32_float32",
        [_ROWS, _WHOLE],
        [_EIGHT, _THREE],
    ),
    Shape(
        "triton/batches/batch_then_none_in_none.pbtxt",
        f"{_QA}/ensemble_models/batch_to_nobatch_nobatch_float32_float32_float32",
        [_ROWS, _WHOLE],
        [_EIGHT],
    ),
    Shape(
        "triton/batches/none_then_batch.pbtxt",
        f"{_QA}/ensemble_models/nobatch_to_batch_float32_float32_float32",
        [_ROWS, _WHOLE],
        [_EIGHT, _THREE],
    ),
    Shape(
        "triton/batches/none_then_batch_in_none.pbtxt",
        f"{_QA}/ensemble_models/nobatch_to_batch_nobatch_float32_float32_float32",
        [_ROWS, _WHOLE],
        [_EIGHT],
    ),
    Shape(
        "triton/batches/to_and_fro.pbtxt",
        f"{_QA}/ensemble_models/mix_nobatch_batch_float32_float32_float32",
        [_ROWS, _WHOLE, _same("by_row", "-1", 8)],
        [_EIGHT, _THREE],
    ),
    Shape(
        "triton/batches/rows_as_a_dimension.pbtxt",
        f"{_QA}/L0_model_config/autofill_noplatform_success/ensemble/inconsistent_shape",
        [_same("four_rows", "16", 4), _same("table", "-1,16")],
        [Request({"data": _A[:2]}, {"prob": _A[:2]})],
    ),
    Shape(
        "triton/batches/a_dimension_as_rows.pbtxt",
        f"{_QA}/L0_model_config/autofill_noplatform_success/ensemble/inconsistent_shape_2",
        [_same("four_rows", "16", 4), _same("table", "-1,16")],
        [Request({"data": _A[:4]}, {"prob": _A[:4]})],
    ),
    Shape(
        "triton/batches/reshaped.pbtxt",
        f"{_QA}/common/gen_ensemble_model_utils.py (reshape, simple)",
        [_same("flat", "16", 8)],
        [Request({"A": _SQUARES}, {"B": _SQUARES})],
    ),
    Shape(
        "triton/batches/reshaped_twice.pbtxt",
        f"{_QA}/common/gen_ensemble_model_utils.py (reshape, sequence and fan)",
        [_same("flat", "16"), Model("deep", "X:FP32:16", "Y:FP32:2,8", lambda x: {"Y": x["X"].reshape(2, 8)})],
        [Request({"A": _SQUARES[0]}, {"B": _SQUARES[0]})],
    ),
]


def _zeros(x: Given) -> Arrays:
    rows = len(next(iter(x.values())))
    return {f"{name}_OUT": x.get(name, np.zeros((rows, 1), np.float32)) for name in "AB"}


_ZEROS = Model("zeros", "A?:FP32:1 B?:FP32:1", "A_OUT:FP32:1 B_OUT:FP32:1", _zeros, 4)
_ECHO = Model(
    "echo",
    "A?:FP32:1 B?:FP32:1",
    "A_OUT:FP32:1 B_OUT:FP32:1",
    lambda x: {f"{name}_OUT": array for name, array in x.items()},
    4,
)
_ONE, _TWO, _ZERO = floats([1]), floats([2]), floats([0])
_SUMS = Model("full", "A:INT32:16 B:INT32:16", "SUM:INT32:16 DIFF:INT32:16", _sum, 8)
_SUM_ONLY = Model(
    "sum_only", "A:INT32:16 B:INT32:16", "SUM:INT32:16 DIFF:INT32:16", lambda x: {"SUM": _sum(x)["SUM"]}, 8
)
_PARTIAL = {"A": _A[:1].astype(np.int32), "B": _B[:1].astype(np.int32)}

_OPTIONAL = [
    Shape(
        "triton/optional/wrapper.pbtxt",
        f"{_QA}/L0_optional_input/models/ensemble_identity_2_float32",
        [_ZEROS],
        [
            Request({"A": _ONE, "B": _TWO}, {"A_OUT": _ONE, "B_OUT": _TWO}),
            Request({"A": _ONE}, {"A_OUT": _ONE, "B_OUT": _ZERO}),
            Request({"B": _TWO}, {"A_OUT": _ZERO, "B_OUT": _TWO}),
        ],
    ),
    Shape(
        "triton/optional/unconnected.pbtxt",
        f"{_QA}/L0_optional_input/models/pipeline_identity_2_float32",
        [_ZEROS],
        [Request({"A": _ONE, "B": _TWO}, {"A_OUT": _ZERO, "B_OUT": _ONE})],
    ),
    Shape(
        "triton/optional/left_out.pbtxt",
        f"{_QA}/L0_optional_input/models/optional_connecting_tensor",
        [_ECHO],
        [
            Request({"A": _ONE}, {"A_OUT": _ONE}, outputs=("A_OUT",)),
            Request({"A": _ONE, "B": _TWO}, {"A_OUT": _ONE, "B_OUT": _TWO}),
            Request({"B": _TWO}, {"B_OUT": _TWO}),
        ],
    ),
    Shape(
        "triton/optional/partial.pbtxt",
        f"{_QA}/L0_simple_ensemble/models/ensemble_partial_add_sub",
        [_SUMS, _SUM_ONLY],
        [
            Request(_PARTIAL, {"SUM": _PARTIAL["A"]}),
            Request(_PARTIAL, {"SUM": _PARTIAL["A"]}, outputs=("SUM", "DIFF")),
        ],
    ),
]


def _repeat(x: Given) -> Iterator[Arrays]:
    assert x["IN"].shape == x["DELAY"].shape
    for index, number in enumerate(x["IN"]):
        yield {"OUT": integers(number), "IDX": np.array([index], np.uint32)}


_REPEAT = Model(
    "repeat", "IN:INT32:-1 DELAY:UINT32:-1 WAIT:UINT32:1", "OUT:INT32:1 IDX:UINT32:1", _repeat, is_decoupled=True
)
_SQUARE = Model(
    "square", "IN:INT32:1", "OUT:INT32:1", lambda x: [{"OUT": x["IN"]}] * int(x["IN"][0]), is_decoupled=True
)
_SAME = _same("same", "1", datatype="INT32")


def _numbers(*numbers: int) -> Arrays:
    return {
        "IN": np.array(numbers, np.int32),
        "DELAY": np.zeros(len(numbers), np.uint32),
        "WAIT": np.zeros(1, np.uint32),
    }


def _repeated(*numbers: int) -> Request:
    expected = [{"OUT": integers(n), "IDX": np.array([i], np.uint32)} for i, n in enumerate(numbers)]
    return Request(_numbers(*numbers), expected)


_THREE_SQUARED = Request(_numbers(2, 0, 3), [{"OUT": integers(n)} for n in (2, 2, 3, 3, 3)])
_PRODUCER = [
    Model(
        "producer",
        "IN:INT32:1",
        "OUT:FP32:1",
        lambda x: [{"OUT": floats(0.5)}] * int(x["IN"][0]),
        is_decoupled=True,
    ),
    _same("slow", "1", 1),
]
_PRODUCED = Request({"IN": integers(8)}, [{"OUT": floats(0.5)}] * 8)

_STREAMS = [
    Shape(
        "triton/streams/repeat_alone.pbtxt",
        f"{_QA}/L0_decoupled/models/simple_repeat",
        [_REPEAT],
        [_repeated(4, 2, 0), _repeated()],
    ),
    Shape(
        "triton/streams/repeat_then_same.pbtxt",
        f"{_QA}/L0_decoupled/models/sequence_repeat",
        [_REPEAT, _SAME],
        [_repeated(4, 2, 0)],
    ),
    Shape(
        "triton/streams/repeat_then_fan.pbtxt",
        f"{_QA}/L0_decoupled/models/fan_repeat",
        [_REPEAT, _SAME, Model("add", "A:INT32:1 B:INT32:1", "SUM:INT32:1", lambda x: {"SUM": x["A"] + x["B"]})],
        [Request(_numbers(1, 5), [{"OUT": integers(2)}, {"OUT": integers(10)}])],
    ),
    Shape(
        "triton/streams/repeat_then_square.pbtxt",
        f"{_QA}/L0_decoupled/models/repeat_square",
        [_REPEAT, _SQUARE],
        [_THREE_SQUARED],
    ),
    Shape(
        "triton/streams/nested_square.pbtxt",
        f"{_QA}/L0_decoupled/models/nested_square",
        [_REPEAT, _SQUARE],
        [_THREE_SQUARED],
        others=("repeat_inner.pbtxt",),
    ),
    Shape(
        "triton/streams/stream_then_call.pbtxt",
        f"{_QA}/L0_metrics/ensemble_decoupled",
        [
            Model(
                "stream",
                "SECONDS:FP32:1 TIMES:UINT8:1",
                "SECONDS:FP32:1 TIMES:UINT8:1",
                lambda x: [dict(x)] * int(x["TIMES"][0]),
                is_decoupled=True,
            ),
            Model("call", "SECONDS:FP32:1 TIMES:UINT8:1", "SECONDS:FP32:1", lambda x: {"SECONDS": x["SECONDS"]}),
        ],
        [Request({"SECONDS": floats(0.25), "TIMES": np.array([3], np.uint8)}, [{"DONE": floats(0.25)}] * 3)],
    ),
    Shape(
        "triton/streams/producer_unbounded.pbtxt",
        f"{_QA}/L0_simple_ensemble/backpressure_test_models/ensemble_disabled_max_inflight_requests",
        _PRODUCER,
        [_PRODUCED],
    ),
    Shape(
        "triton/streams/producer_bounded.pbtxt",
        f"{_QA}/L0_simple_ensemble/test.sh (max_inflight_requests)",
        _PRODUCER,
        [_PRODUCED],
    ),
]

SHAPES = [*_BATCHES, *_OPTIONAL, *_STREAMS]
