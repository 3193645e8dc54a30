"""Seldon Core 2: pipelines and experiments of its samples, documentation and tests, converted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.compat.graphs.shape import Arrays, Given, Model, Request, Shape, floats, integers, texts

_SELDON = "SeldonIO/seldon-core (v2)"
_PIPELINES, _EXPERIMENTS = "samples/pipelines", "samples/experiments"
_X, _ONE, _SOME = floats([1, 2, 3, 4]), integers([1]), floats([1])
_A, _B = integers([1, 2, 3, 4]), integers([4, 3, 2, 1])
_AB = {"A": _A, "B": _B}


def _adder(name: str) -> Model:
    return Model(
        name,
        "A:INT32:4 B:INT32:4",
        "SUM:INT32:4 DIFF:INT32:4",
        lambda x: {"SUM": x["A"] + x["B"], "DIFF": x["A"] - x["B"]},
        8,
    )


def _real(name: str, times: float, plus: float) -> Model:
    return Model(name, "X:FP32:4", "Y:FP32:4", lambda x: {"Y": x["X"] * np.float32(times) + np.float32(plus)}, 8)


_ADDERS = [_adder(name) for name in ("adder", "adder1", "adder2", "adder3")]
_MUL10, _ADD10 = _real("mul10", 10, 0), _real("add10", 1, 10)
_TIMES, _PLUS = {"Y": _X * 10}, {"Y": _X + 10}
_IRIS, _IRIS2 = _real("iris", 2, 0), _real("iris2", 3, 0)


def _shape(file: str, source: str, models: Sequence[Model], *requests: Request, **more: Any) -> Shape:
    return Shape(f"seldon2/{file}.yaml", f"{_SELDON}: {source}", models, requests, **more)


def _pair(a: np.ndarray, b: np.ndarray) -> Arrays:
    return {"SUM": a + b, "DIFF": a - b}


def _conditional(x: Given) -> Arrays:
    """LEFT for 0, RIGHT for anything else."""
    return {"RIGHT": x["B"]} if x["CHOICE"][0, 0] else {"LEFT": x["A"]}


def _is(name: str, number: int) -> Model:
    return Model(
        name,
        "X:FP32:4 CHOICE:INT32:1",
        "CHOICE?:INT32:1",
        lambda x: {"CHOICE": x["CHOICE"]} if x["CHOICE"][0, 0] == number else {},
        8,
    )


def _copy(name: str, x: str, y: str, dims: str = "4", datatype: str = "FP32") -> Model:
    return Model(name, f"{x}:{datatype}:{dims}", f"{y}:{datatype}:{dims}", lambda given: {y: given[x]}, 8)


_CONDITIONAL = Model("conditional", "CHOICE:INT32:1 A:FP32:4 B:FP32:4", "LEFT?:FP32:4 RIGHT?:FP32:4", _conditional, 8)
_CHECK = Model("check", "X:INT32:4", "OK?:INT32:4", lambda x: {"OK": x["X"]} if x["X"].sum() < 100 else {}, 8)

_TENSORS = [
    _shape(
        "one_step",
        f"{_PIPELINES}/add10.yaml, mul10.yaml, tfsimple.yaml, iris.yaml, income-v1.yaml, version-test-a.yaml, "
        "version-test-b.yaml",
        _ADDERS,
        Request(_AB, _pair(_A, _B)),
    ),
    _shape(
        "chain",
        "docs-gb/pipelines.md (chain), samples/quickstart/pipelines/income-classifier-app.yaml",
        [_copy("first", "X", "Y"), Model("second", "Y:FP32:4", "Z:FP32:4", lambda x: {"Z": -x["Y"]}, 8)],
        Request({"X": _X}, {"Z": -_X}),
    ),
    _shape("chain_renamed", f"{_PIPELINES}/tfsimples.yaml", _ADDERS, Request(_AB, {"SUM": 2 * _A, "DIFF": 2 * _B})),
    _shape("chain_of_parts", f"{_PIPELINES}/tfsimples-input.yaml", _ADDERS, Request(_AB, _pair(_A, _A - _B))),
    _shape("join", f"{_PIPELINES}/tfsimples-join.yaml", _ADDERS, Request(_AB, {"SUM": 2 * _A, "DIFF": 2 * _B})),
    _shape(
        "join_with_trigger",
        f"{_PIPELINES}/tfsimples-join-outlier.yaml",
        [*_ADDERS, _CHECK],
        Request(_AB, {"SUM": 2 * _A, "DIFF": 2 * _B}),
        Request({"A": 99 * _A, "B": _B}, error="INVALID_ARGUMENT"),
    ),
    _shape(
        "by_tensor",
        f"{_PIPELINES}/pipeline-inputs.yaml",
        [_MUL10, _ADD10],
        Request({"LEFT": _X, "RIGHT": -_X}, {"Y": 10 * _X, "add10_Y": 10 - _X}),
        check="the name 'Y' is that of another tensor",
    ),
    _shape(
        "explained",
        f"{_PIPELINES}/sentiment-explain.yaml",
        [
            _copy("sentiment", "array", "mood"),
            Model("tidy", "mood:FP32:4", "tidy:BOOL:4", lambda x: {"tidy": x["mood"] > 2}, 8),
        ],
        Request({"predict": _X}, {"tidy": _X > 2}),
    ),
    _shape(
        "speech",
        f"{_PIPELINES}/speech-to-sentiment.yaml, samples/examples/huggingface",
        [
            Model("whisper", "speech:FP32:4", "text:BYTES:1", lambda x: {"text": texts([str(x["speech"].sum())])}, 8),
            Model(
                "mood",
                "args:BYTES:1",
                "mood:BYTES:1",
                lambda x: {"mood": texts(["GOOD " + x["args"][0, 0].decode()])},
                8,
            ),
            _copy("tidy", "text", "tidy", "1", "BYTES"),
            _copy("explain", "tidy", "why", "1", "BYTES"),
        ],
        Request({"speech": _X}, {"mood": texts(["GOOD 10.0"]), "text": texts(["10.0"])}),
    ),
]
_CHOICES = [
    _shape(
        "one_of_two",
        f"{_PIPELINES}/conditional.yaml",
        [_CONDITIONAL, _MUL10, _ADD10],
        Request({"CHOICE": integers([0]), "A": _X, "B": -_X}, {"Y": 10 * _X}, called=["conditional", "mul10"]),
        Request({"CHOICE": integers([1]), "A": _X, "B": -_X}, {"Y": 10 - _X}, called=["conditional", "add10"]),
    ),
    _shape(
        "choice",
        f"{_PIPELINES}/choice.yaml, samples/examples/pandasquery",
        [_is("is-one", 1), _is("is-two", 2), _MUL10, _ADD10],
        Request({"CHOICE": integers([1]), "X": _X}, _TIMES),
        Request({"CHOICE": integers([2]), "X": _X}, _PLUS),
        Request({"CHOICE": integers([3]), "X": _X}, error="INVALID_ARGUMENT"),
    ),
    _shape(
        "trigger_joins",
        f"{_PIPELINES}/trigger-joins.yaml",
        [_MUL10, _ADD10],
        Request({"X": _X, "ok1": _SOME}, _TIMES),
        Request({"X": _X, "ok2": _SOME}, _TIMES),
        Request({"X": _X, "ok3": _SOME}, _PLUS),
    ),
    _shape(
        "triggers_of_inputs",
        f"{_PIPELINES}/triggers_join_inputs.yaml",
        _ADDERS,
        Request({**_AB, "T1": _SOME}, _pair(_A, _B)),
        Request({**_AB, "T2": _SOME}, _pair(_A, _B)),
        Request(_AB, error="INVALID_ARGUMENT"),
    ),
    _shape(
        "triggers_of_steps",
        f"{_PIPELINES}/triggers_join_internal.yaml",
        [*_ADDERS, *(_copy(name, "X", "Y", "1", "INT32") for name in ("pass1", "pass2"))],
        Request({**_AB, "T1": _ONE}, _pair(_A, _B), called=["pass1", "adder"]),
        Request({**_AB, "T2": _ONE}, _pair(_A, _B), called=["pass2", "adder"]),
    ),
]


_OUTLIERS = Model("outliers", "X:FP32:4", "Y:FP32:4", max_batch_size=8, fails="an outlier")
_INCOME = _real("income", 2, 1)
_DRIFT = Model(
    "drift", "X:FP32:4", "is_drift:INT64:1", lambda x: {"is_drift": np.zeros((len(x["X"]), 1), np.int64)}, 32
)
_PREPARE = _copy("prepare", "X", "ready")


def _outlier(name: str, given: str) -> Model:
    return Model(
        name,
        f"{given}:FP32:4",
        "is_outlier:INT64:1 distance:FP32:1",
        lambda x: {
            "is_outlier": (x[given].sum(1, keepdims=True) > 20).astype(np.int64),
            "distance": x[given].sum(1, keepdims=True),
        },
        8,
    )


_TWO = floats([1, 2, 3, 4], [9, 9, 9, 9])
_FOUND = np.array([[0], [1]], np.int64)
_ASIDE = [
    _shape("error", f"{_PIPELINES}/error.yaml", [_OUTLIERS], Request({"X": _X}, error="an outlier")),
    _shape(
        "error_before",
        f"{_PIPELINES}/outlier.yaml",
        [_OUTLIERS, _ADD10],
        Request({"X": _X}, error="an outlier", called=["outliers"]),
    ),
    _shape(
        "batch",
        f"{_PIPELINES}/iris-batch.yaml, samples/k8s-batch-examples.md",
        [_IRIS],
        Request({"X": _X}, {"Y": 2 * _X}),
    ),
    _shape(
        "drift_aside",
        f"{_PIPELINES}/income-v2.yaml, docs-gb/drift.md",
        [_INCOME, _DRIFT],
        Request({"X": _TWO}, {"Y": 2 * _TWO + 1}),
    ),
    _shape(
        "drift_and_outliers",
        f"{_PIPELINES}/income.yaml, income-v3.yaml",
        [_INCOME, _DRIFT, _PREPARE, _outlier("outlier", "ready")],
        Request({"X": _TWO}, {"Y": 2 * _TWO + 1, "is_outlier": _FOUND}),
    ),
    _shape(
        "outliers_aside",
        f"{_PIPELINES}/cifar10.yaml",
        [_real("image", 5, 0), _outlier("image-outlier", "X"), _copy("image-drift", "X", "is_drift")],
        Request({"X": _TWO}, {"Y": 5 * _TWO, "is_outlier": _FOUND}),
    ),
    _shape(
        "drift_answered",
        f"{_PIPELINES}/iris-async-drift.yaml",
        [_IRIS, _copy("iris-drift", "X", "is_drift")],
        Request({"X": _TWO}, {"Y": 2 * _TWO, "is_drift": _TWO}),
        check="Seldon keeps the requests of 'iris-drift'",
    ),
    _shape("topics", "docs-gb/managing-kafka-topics.md", [_IRIS], Request({"X": _X}, {"Y": 2 * _X})),
    _shape(
        "counter",
        "docs-gb/examples/pipeline-cyclic.md",
        [
            Model(
                "count",
                "number:INT32:1",
                "number:INT32:1 continue?:BYTES:1 stop?:BYTES:1",
                lambda x: {"number": x["number"] + 1, "continue" if x["number"][0, 0] < 9 else "stop": texts([""])},
                8,
            ),
            _copy("finish", "number", "number", "1", "INT32"),
            _copy("again", "number", "number", "1", "INT32"),
        ],
        Request({"number": np.array([[0]], np.int32)}, {"number": np.array([[10]], np.int32)}),
        Request({"number": np.array([[20]], np.int32)}, {"number": np.array([[21]], np.int32)}),
    ),
]
#: SUM and DIFF of SUM and DIFF are 2A and 2B.
_TWICE = {"SUM": 2 * _A, "DIFF": 2 * _B}
_OF_PIPELINES = [
    _shape("pipeline_of_pipeline", f"{_PIPELINES}/tfsimple-extended.yaml", _ADDERS, Request(_AB, _TWICE)),
    _shape("pipeline_of_step", f"{_PIPELINES}/tfsimple-extended-step.yaml", _ADDERS, Request(_AB, _TWICE)),
    _shape(
        "pipeline_of_two",
        f"{_PIPELINES}/tfsimple-combined.yaml",
        _ADDERS,
        Request(_AB, _pair(2 * _A, 2 * _B)),
    ),
    _shape(
        "pipeline_with_trigger",
        f"{_PIPELINES}/tfsimple-combined-trigger.yaml",
        _ADDERS,
        Request(_AB, _pair(2 * _A, 2 * _B), called=["adder1", "adder2", "adder2", "adder2"]),
    ),
    _shape(
        "pipeline_of_two_steps",
        f"{_PIPELINES}/tfsimple-combined-step.yaml",
        _ADDERS,
        Request(_AB, _pair(2 * _A, 2 * _A)),
    ),
]
_EITHER = Request({"X": _X}, ({"Y": 2 * _X}, {"Y": 3 * _X}))
_SPLIT = [
    _shape("experiment", f"{_EXPERIMENTS}/ab.yaml", [_IRIS, _IRIS2], *[_EITHER] * 3),
    _shape(
        "experiment_with_default",
        f"{_EXPERIMENTS}/ab-default-model.yaml (and 2, 3), add1020.yaml",
        [_IRIS, _IRIS2],
        *[_EITHER] * 3,
        check="clients have to ask for that",
    ),
    _shape(
        "experiment_of_pipelines",
        f"{_EXPERIMENTS}/addmul10.yaml",
        [_MUL10, _ADD10],
        *[Request({"X": _X}, (_TIMES, _PLUS))] * 3,
        check="clients have to ask for that",
    ),
    _shape(
        "mirror",
        f"{_EXPERIMENTS}/sklearn-mirror.yaml",
        [_IRIS, _IRIS2],
        Request({"X": _X}, {"Y": 2 * _X}),
        check="clients have to ask for that",
    ),
    _shape(
        "mirror_of_pipelines",
        f"{_EXPERIMENTS}/addmul10-mirror.yaml",
        [_MUL10, _ADD10],
        Request({"X": _X}, _PLUS),
        check="clients have to ask for that",
    ),
]
_WRONG = [
    _shape(
        "wrong_field",
        f"{_PIPELINES}/error-bad-spec.yaml",
        [_CONDITIONAL, _MUL10],
        Request({"X": _X}, _TIMES),
        check="unknown field 'input' of the step is left out",
    ),
    _shape("wrong_field_of_experiment", f"{_EXPERIMENTS}/error-bad-spec.yaml", [_IRIS], refused="candidates"),
    _shape("empty_input", f"{_PIPELINES}/error-empty-input.yaml", [_IRIS], refused="an entry of inputs is empty"),
    _shape("empty_trigger", f"{_PIPELINES}/error-empty-trigger.yaml", [_IRIS], refused="an entry of triggers is empty"),
    _shape("same_name", f"{_PIPELINES}/error-step-name.yaml", [_IRIS], refused="has the name of its pipeline"),
]

SHAPES = [*_TENSORS, *_CHOICES, *_ASIDE, *_OF_PIPELINES, *_SPLIT, *_WRONG]
