"""Seldon Core 1: deployments of its documentation, examples, charts and tests, converted."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from tests.compat.graphs.shape import Arrays, Model, Request, Shape, floats, texts

_SELDON = "SeldonIO/seldon-core (v1)"
_X = floats([1, 2], [3, 5])


def _model(name: str, formula: Callable[[np.ndarray], np.ndarray]) -> Model:
    return Model(name, "X:FP32:2", "X:FP32:2", lambda x: {"X": formula(x["X"])}, 8)


_FIRST = _model("first", lambda x: x + 1)
_SECOND = _model("second", lambda x: x * 2)
_THIRD = _model("third", lambda x: x - 3)
_SCALE = _model("scale", lambda x: x / 10)
_DETECT = _model("detect", lambda x: x)
_CLASSIFIER = Model("classifier", "X:FP32:2", "P:FP32:3", lambda x: {"P": _probs(x["X"], 1)}, 8)
_LEFT, _RIGHT, _MIDDLE = (
    Model(name, "X:FP32:2", "P:FP32:3", lambda x, number=number: {"P": _probs(x["X"], number)}, 8)
    for name, number in (("left", 1), ("right", 2), ("middle", 6))
)
_LABEL = Model(
    "label", "P:FP32:3", "NAME:BYTES:1", lambda x: {"NAME": texts(*(["abc"[i]] for i in x["P"].argmax(1)))}, 8
)


def _probs(x: np.ndarray, number: float) -> np.ndarray:
    """The features and their sum, times a number."""
    return (np.concatenate([x, x.sum(1, keepdims=True)], 1) * number).astype(np.float32)


def _p(number: float, x: np.ndarray = _X) -> Arrays:
    return {"P": _probs(x, number)}


def _shape(file: str, source: str, models: Sequence[Model], *requests: Request, **more: Any) -> Shape:
    return Shape(f"seldon1/{file}.yaml", f"{_SELDON}: {source}", models, requests, **more)


def _asked(expected: Any, **more: Any) -> Request:
    return Request({"X": _X}, expected, **more)


def _word(name: str, given: str, gives: str, formula: Callable[[str], str]) -> Model:
    def answer(x: Arrays) -> Arrays:
        return {gives: texts(*([formula(text.decode())] for text in x[given][:, 0]))}

    return Model(name, f"{given}:BYTES:1", f"{gives}:BYTES:1", answer, 8)


_MERGE = Model("merge", "P:FP32:2,3", "P:FP32:3", lambda x: {"P": x["P"][:, 0] - x["P"][:, 1]}, 8)
_MERGE_ONE = Model("merge_one", "P:FP32:1,3", "P:FP32:3", lambda x: {"P": -x["P"][:, 0]}, 8)
_ROUTE = Model("route", "X:FP32:2", "ROUTE:INT32:1", lambda x: {"ROUTE": x["X"][:1, :1].astype(np.int32)}, 8)


def _routed(route: float, **expected: Any) -> Request:
    return Request({"X": floats([route, 2])}, **expected)


_CHAINS = [
    _shape(
        "one_model",
        "doc/source/graph/inference-graph.md, testing/resources/graph1.json to graph4.json, graph7.json, graph8.json, "
        "helm-charts/seldon-single-model, helm-charts/seldon-od-model and all other deployments of one model",
        [_CLASSIFIER],
        _asked(_p(1)),
    ),
    _shape("one_server", "doc/source/analytics/explainers.md, doc/source/servers", [_CLASSIFIER], _asked(_p(1))),
    _shape(
        "two_in_a_row",
        "testing/resources/graph5.json, testing/resources/tags_graph_rest.json, doc/source/graph/protocols.md, "
        "examples/models/metadata/graph-metadata/two-levels.yaml",
        [_FIRST, _SECOND],
        _asked({"X": (_X + 1) * 2}),
    ),
    _shape("three_in_a_row", "doc/source/graph/graph-modes.md", [_FIRST, _SECOND, _THIRD], _asked({"X": _X * 2 - 1})),
    _shape(
        "four_in_a_row",
        "examples/kubeflow/deploy_pipeline/seldon_production_pipeline.yaml",
        [
            _word("clean", "TEXT", "TEXT", str.lower),
            _word("split", "TEXT", "WORDS", lambda text: "|".join(text.split())),
            Model(
                "count",
                "WORDS:BYTES:1",
                "COUNT:FP32:1",
                lambda x: {"COUNT": floats(*([text.count(b"|") + 1] for text in x["WORDS"][:, 0]))},
                8,
            ),
            Model("judge", "COUNT:FP32:1", "LONG:BOOL:1", lambda x: {"LONG": x["COUNT"] > 2}, 8),
        ],
        Request({"TEXT": texts(["A b c"], ["D"])}, {"LONG": np.array([[True], [False]])}),
    ),
    _shape(
        "untyped_chain",
        "examples/transformers/v2-protocol/seldondeployment.yaml",
        [
            _word("encode", "TEXT", "IDS", lambda text: text[::-1]),
            _word("generate", "IDS", "MORE", lambda ids: ids + "!"),
            _word("decode", "MORE", "TEXT", lambda more: more[::-1]),
        ],
        Request({"TEXT": texts(["abc"])}, {"TEXT": texts(["!abc"])}),
    ),
    _shape("untyped_preprocessor", "testing/resources/graph-v2.yaml", [_FIRST, _SECOND], _asked({"X": (_X + 1) * 2})),
    _shape(
        "transformer",
        "notebooks/resources/feature_transform.json, helm-charts/seldon-od-transformer, "
        "examples/models/metadata/graph-metadata/input-transformer.yaml",
        [_SCALE, _CLASSIFIER],
        _asked(_p(1, _X / 10)),
    ),
    _shape(
        "output_transformer",
        "examples/output_transformers, examples/models/metadata/graph-metadata/output-transformer.yaml",
        [_CLASSIFIER, _LABEL],
        _asked({"NAME": texts(["c"], ["c"])}),
    ),
    _shape(
        "both_transformers",
        "examples/graph_examples/tin-model-tout.yaml (and -sep-pods, -sep-svcorch)",
        [_SCALE, _CLASSIFIER, _LABEL],
        _asked({"NAME": texts(["c"], ["c"])}, called=["scale", "classifier", "label"]),
    ),
    _shape("lone_transformer", "testing/resources/s2i_python_transformer.json", [_SCALE], _asked({"X": _X / 10})),
    _shape(
        "one_child_as_mapping",
        "doc/source/graph/inference-graph.md (pre- and post-processor)",
        [_FIRST, _SECOND, _THIRD],
        refused="children",
    ),
    _shape("in_time", "notebooks/resources/model_long_timeouts.json", [_FIRST, _SECOND], _asked({"X": (_X + 1) * 2})),
]
_TREES = [
    _shape(
        "combiner",
        "examples/graph_examples/combiner.yaml (and -prepack, -sep-pods), examples/models/metadata/graph-metadata/"
        "combiner.yaml, testing/resources/tags_combiner_rest.json, docs-gb/notebooks/outlier_combiner.md",
        [_LEFT, _RIGHT, _MERGE],
        _asked(_p(-1)),
        check="all of them stacked along a new axis",
    ),
    _shape(
        "combiner_of_one",
        "testing/resources/s2i_python_combiner.json",
        [_LEFT, _MERGE_ONE],
        _asked(_p(-1)),
        check="all of them stacked along a new axis",
    ),
    _shape("average", "notebooks/resources/ensemble.json", [_LEFT, _RIGHT, _MIDDLE], _asked(_p(3))),
    _shape(
        "router",
        "doc/source/graph/svcorch.md, examples/models/metadata/graph-metadata/router.yaml",
        [_LEFT, _RIGHT, _ROUTE],
        _routed(0, expected=_p(1, floats([0, 2])), called=["route", "left"]),
        _routed(1, expected=_p(2, floats([1, 2])), called=["route", "right"]),
        _routed(-2, error="INVALID_ARGUMENT"),
        check="-2 for no child",
    ),
    _shape(
        "router_of_one",
        "testing/resources/s2i_python_router.json",
        [_LEFT, _ROUTE],
        _routed(0, expected=_p(1, floats([0, 2])), called=["route", "left"]),
        check="-2 for no child",
    ),
    _shape(
        "ab_test",
        "notebooks/resources/random_ab_test.json, helm-charts/seldon-abtest",
        [_LEFT, _RIGHT],
        *[_asked((_p(1), _p(2)))] * 3,
    ),
    _shape(
        "epsilon_greedy",
        "components/routers/case_study/assets/eg_deployment.json, helm-charts/seldon-mab",
        [_LEFT, _RIGHT],
        *[_asked((_p(1), _p(2)))] * 3,
    ),
    _shape(
        "epsilon_greedy_of_three",
        "notebooks/resources/epsilon_greedy.json, components/routers/epsilon-greedy",
        [_LEFT, _RIGHT, _MIDDLE],
        *[_asked((_p(1), _p(2), _p(6)))] * 3,
    ),
    _shape(
        "thompson",
        "components/routers/case_study/assets/ts_deployment.json",
        [_LEFT, _RIGHT],
        *[_asked((_p(1), _p(2)))] * 3,
    ),
    _shape(
        "outlier_before_ab_test",
        "notebooks/resources/outlier_detector.json",
        [_DETECT, _LEFT, _RIGHT],
        *[_asked((_p(1), _p(2)))] * 3,
    ),
    _shape(
        "tree",
        "notebooks/resources/complex_graph.json",
        [_DETECT, _SCALE, _LEFT, _RIGHT, _MIDDLE],
        *[_asked((_p(1, _X / 10), _p(4)))] * 3,
    ),
]
_PREDICTORS = [
    _shape(
        "tree_with_canary",
        "notebooks/resources/complex_graph_with_canary.json",
        [_DETECT, _SCALE, _LEFT, _RIGHT, _MIDDLE],
        *[_asked((_p(1, _X / 10), _p(4)))] * 3,
        check="traffic",
    ),
    _shape(
        "canary",
        "examples/ambassador/canary, doc/source/ingress/istio.md, examples/models/mlflow_server_ab_test_ambassador",
        [_LEFT, _RIGHT],
        *[_asked((_p(1), _p(2)))] * 3,
    ),
    _shape(
        "canary_of_one_name",
        "testing/resources/graph6.json, testing/resources/graph6svc.json",
        [_CLASSIFIER],
        _asked(_p(1)),
        check="classifier",
    ),
    _shape(
        "canary_without_traffic",
        "doc/source/rollouts/abtests.md, examples/iter8/progressive_rollout/single_sdep/abtest.yaml",
        [_LEFT, _RIGHT],
        _asked(_p(1)),
        check="predictor 'candidate' has no traffic",
    ),
    _shape(
        "canary_unsaid",
        "notebooks/resources/model_with_canary.json",
        [_LEFT, _RIGHT],
        _asked((_p(1), _p(2))),
        check="traffic",
    ),
    _shape(
        "chain_beside_model",
        "doc/source/graph/scaling.md, notebooks/resources/model_replicas.yaml",
        [_FIRST, Model("second", "X:FP32:2", "P:FP32:3", lambda x: _p(5, x["X"]), 8), _CLASSIFIER],
        *[_asked((_p(5, _X + 1), _p(1)))] * 3,
    ),
    _shape("shadow", "examples/istio/shadow/istio_shadow.ipynb", [_LEFT, _RIGHT], _asked(_p(1))),
    _shape("shadow_unsaid", "examples/ambassador/shadow/ambassador_shadow.ipynb", [_LEFT, _RIGHT], _asked(_p(1))),
    _shape("simple_model", "notebooks/resources/loadtest_simple_model.json", [_CLASSIFIER], refused="G002"),
    _shape("no_graph", "testing/resources/bad_no_graph.yaml", [_CLASSIFIER], refused="the predictor has no 'graph'"),
]

SHAPES = list(chain(_CHAINS, _TREES, _PREDICTORS))
