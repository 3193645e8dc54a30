"""Triton: chains, fans, ensembles in ensembles, versions, parameters, each without any change of shape."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tests.compat.graphs.shape import Arrays, Given, Model, Request, Shape, floats, texts

_QA = "triton-inference-server/server: qa"


def _add_sub(name: str, types: Sequence[str] = ("FP32", "FP32"), *, max_batch_size: int = 8, **more: str) -> Model:
    """Sum and difference of 16 numbers, which may come as text and leave as text."""
    came, leaves = types
    total, less = more.get("outputs", "SUM DIFF").split()
    numpy = {"FP32": np.float32, "INT32": np.int32}

    def answer(x: Arrays) -> Arrays:
        a, b = (array.astype(np.int32) if came == "BYTES" else array for array in (x["A"], x["B"]))
        both: list[np.ndarray] = [a + b, a - b]
        if leaves == "BYTES":
            both = [np.vectorize(lambda number: str(number).encode(), otypes=[object])(one) for one in both]
        else:
            both = [one.astype(numpy[leaves]) for one in both]
        return dict(zip((total, less), both, strict=True))

    tensors = f"A:{came}:16 B:{came}:16", f"{total}:{leaves}:16 {less}:{leaves}:16"
    return Model(name, *tensors, answer, max_batch_size)


def _same(name: str, dims: str = "-1", max_batch_size: int = 0, factor: float = 1) -> Model:
    return Model(name, f"X:FP32:{dims}", f"Y:FP32:{dims}", lambda x: {"Y": x["X"] * np.float32(factor)}, max_batch_size)


_RANDOM = np.random.default_rng(7)
_A, _B = (_RANDOM.integers(0, 100, (3, 16)).astype(np.float32) for _ in "ab")
_IA, _IB = _A.astype(np.int32), _B.astype(np.int32)
_BOTH = Request({"A": _A, "B": _B}, {"SUM": _A + _B, "DIFF": _A - _B})
_BOTH_WHOLE = Request({"A": _IA, "B": _IB}, {"SUM": _IA + _IB, "DIFF": _IA - _IB})
_PASS = Model(
    "pass", "X:FP32:-1 Y:FP32:-1", "X_OUT:FP32:-1 Y_OUT:FP32:-1", lambda x: {"X_OUT": x["X"], "Y_OUT": x["Y"]}, 8
)
_MIXED_TYPES = (
    _add_sub("whole", ("INT32", "INT32")),
    _add_sub("as_text", ("INT32", "BYTES")),
    _add_sub("of_text", ("BYTES", "INT32")),
    _add_sub("to_real", ("INT32", "FP32")),
    _add_sub("real"),
)
_MIXED_BACKENDS = (_add_sub("onnx"), _add_sub("torch", outputs="OUT__0 OUT__1"))
#: What `mixed_types` makes of a and b: c = a + b; c - b = a; c - a = b; a + b; a, b as real numbers; their sum.
_AS_REAL = Request({"A": _IA, "B": _IB}, {"SUM": _A + _B, "DIFF": _A - _B})


def _hop(name: str) -> Model:
    inputs, outputs = "X:FP32:-1 ON_DEVICE:BOOL:-1", "Y:FP32:-1 NEXT:BOOL:-1"
    return Model(name, inputs, outputs, lambda x: {"Y": x["X"], "NEXT": ~x["ON_DEVICE"]})


def _tell(x: Given) -> Arrays:
    return {"key": texts(*x.parameters), "value": texts(*map(str, x.parameters.values()))}


SHAPES = [
    Shape(
        "triton/basics/single.pbtxt",
        f"{_QA}/common/gen_ensemble_model_utils.py (simple), {_QA}/python_models/simple_identity_fp32, "
        f"{_QA}/L0_model_queue/ensemble_zero_1_float32, {_QA}/L0_lifecycle/ensemble_zero_1_float32",
        [_add_sub("add_sub")],
        [_BOTH, Request(_BOTH.inputs, {"DIFF": _A - _B}, outputs=("DIFF",))],
    ),
    Shape(
        "triton/basics/pass_then_add.pbtxt",
        f"{_QA}/common/gen_ensemble_model_utils.py (sequence)",
        [_PASS, _add_sub("add_sub")],
        [_BOTH],
    ),
    Shape(
        "triton/basics/fan_out_and_in.pbtxt",
        f"{_QA}/common/gen_ensemble_model_utils.py (fan), {_QA}/python_models/fan_add_sub",
        [_PASS, _add_sub("add_sub")],
        [
            _BOTH,
            Request(_BOTH.inputs, {"SUM": _A + _B}, outputs=("SUM",), called=["pass", "add_sub", "pass"]),
        ],
    ),
    Shape(
        "triton/basics/sums_of_sums.pbtxt",
        f"{_QA}/L0_simple_ensemble/models/ensemble_add_sub_int32_int32_int32",
        [replace(_add_sub("plain", ("INT32", "INT32")), versions=("1", "3"))],
        [_BOTH_WHOLE, Request(_BOTH_WHOLE.inputs, {"SUM": _IA + _IB}, outputs=("SUM",), called=["plain"] * 3)],
    ),
    Shape(
        "triton/basics/mixed_types.pbtxt",
        f"{_QA}/ensemble_models/mix_type_int32_float32_float32",
        _MIXED_TYPES,
        [_AS_REAL],
    ),
    Shape(
        "triton/basics/mixed_backends.pbtxt",
        f"{_QA}/ensemble_models/mix_platform_float32_float32_float32",
        _MIXED_BACKENDS,
        [_BOTH],
    ),
    Shape(
        "triton/basics/ensembles_as_steps.pbtxt",
        f"{_QA}/ensemble_models/mix_ensemble_int32_float32_float32",
        [*_MIXED_TYPES, *_MIXED_BACKENDS],
        [_AS_REAL],
        others=("mixed_types.pbtxt", "mixed_backends.pbtxt"),
    ),
    Shape(
        "triton/basics/wrapped.pbtxt",
        f"{_QA}/L0_model_config/autofill_noplatform_success/ensemble/embedded_ensemble",
        [Model("double", "X:FP32:16", "Y:FP32:16", lambda x: {"Y": 2 * x["X"]}, 4)],
        [Request({"data": _A[:2]}, {"prob": 2 * _A[:2]})],
        others=("wrapped_inner.pbtxt",),
    ),
    Shape(
        "triton/basics/one_input_twice.pbtxt",
        f"{_QA}/L0_model_config/autofill_noplatform_success/ensemble/unmapped_output",
        [
            Model(
                "three",
                "A:FP32:16 B:FP32:16 C:FP32:16",
                "FIRST:FP32:16 SECOND:FP32:16 THIRD:FP32:16",
                lambda x: {"FIRST": x["A"] + x["B"] + x["C"], "SECOND": x["B"], "THIRD": x["C"]},
                4,
            )
        ],
        [Request({"data": _A[:2]}, {"prob": 3 * _A[:2]})],
    ),
    Shape(
        "triton/basics/two_in_parallel.pbtxt",
        f"{_QA}/L0_metrics/ensemble_delay, "
        "triton-inference-server/model_analyzer: examples/quick-start/ensemble_add_sub",
        [_same("batching", "1", 4, factor=2), _same("lone", "1", 4, factor=3)],
        [Request({"X": floats([1], [5])}, {"FAST": floats([2], [10]), "SLOW": floats([3], [15])})],
    ),
    Shape(
        "triton/basics/identity_chain.pbtxt",
        f"{_QA}/L0_request_cancellation/test.sh (ensemble_model), {_QA}/L0_pinned_memory/libtorch_ensemble.pbtxt",
        [_same("same", "-1", 1)],
        [Request({"X": floats([1, 2, 3])}, {"Y": floats([1, 2, 3])}, called=["same", "same"])],
    ),
    Shape(
        "triton/basics/no_batch_chain.pbtxt",
        f"{_QA}/python_models/ensemble, {_QA}/python_models/ensemble_gpu, {_QA}/L0_config_json/ensemble_config.pbtxt",
        [_add_sub("first", max_batch_size=0), _add_sub("second", max_batch_size=0)],
        [Request({"A": _A[0], "B": _B[0]}, {"SUM": 2 * _A[0], "DIFF": 2 * _B[0]})],
    ),
    Shape(
        "triton/basics/no_batch_default.pbtxt",
        f"{_QA}/L0_model_config/autofill_noplatform_success/python/conflicting_scheduler_ensemble",
        [_same("half", "4", factor=0.5)],
        [Request({"X": floats(4, 8, 12, 16)}, {"Y": floats(1, 2, 3, 4)})],
    ),
    Shape(
        "triton/basics/three_devices.pbtxt",
        f"{_QA}/python_models/ensemble_io",
        [_hop("hop_1"), _hop("hop_2"), _hop("hop_3")],
        [
            Request(
                {"X": floats(1, 2), "ON_DEVICE": np.array([True, False])},
                {"Y": floats(1, 2), "NEXT": np.array([False, True])},
            )
        ],
    ),
    Shape(
        "triton/basics/versions_of_both.pbtxt",
        f"{_QA}/L0_model_namespacing (addsub and subadd of five repositories), "
        f"{_QA}/L0_metrics/model_namespacing_repos",
        [_add_sub("composing", ("INT32", "INT32"), max_batch_size=0)],
        [Request({"A": _IA[0], "B": _IB[0]}, {"SUM": _IA[0] + _IB[0], "DIFF": _IA[0] - _IB[0]})],
    ),
    Shape(
        "triton/basics/parameters.pbtxt",
        f"{_QA}/L0_parameters/model_repository/ensemble",
        [_same("same", "1"), Model("tell", "X:FP32:1", "key:BYTES:-1 value:BYTES:-1", _tell)],
        [
            Request(
                {"X": floats(1)},
                {"key": texts("word", "number"), "value": texts("salt", "7")},
                parameters={"word": "salt", "number": 7},
            ),
        ],
    ),
    Shape(
        "triton/basics/shown_format.pbtxt",
        f"{_QA}/L0_model_config/noautofill_platform/ensemble_scheduling_set (without its instance group)",
        [
            Model(
                "pool",
                "image:FP32:1,28,28",
                "score:FP32:10,1,1",
                lambda x: {"score": np.repeat(x["image"].sum((2, 3)), 10, 1)[:, :, None, None]},
                8,
            )
        ],
        [Request({"data": np.ones((2, 1, 28, 28), np.float32)}, {"prob": np.full((2, 10, 1, 1), 784, np.float32)})],
    ),
    Shape(
        "triton/basics/labels.pbtxt",
        f"{_QA}/ensemble_models/label_override_int32_float32_float32, "
        f"{_QA}/ensemble_models/wrong_label_int32_float32_float32",
        [_add_sub("to_real", ("INT32", "FP32"))],
        [_AS_REAL],
    ),
]
