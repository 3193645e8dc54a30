"""KServe: inference graphs of its documentation, samples and end-to-end tests, converted."""

from collections.abc import Sequence

import numpy as np
from tests.compat.graphs.shape import Arrays, Given, Model, Request, Shape, floats, integers, texts

_KSERVE = "kserve/kserve"
_SITE = "kserve/website: docs/model-serving/inferencegraph"
_E2E = f"{_KSERVE}: test/e2e/graph/test_inference_graph.py"


def _classifier(name: str, number: int) -> Model:
    """The class is that number times the sum of the features."""
    return Model(
        name,
        "X:FP32:4",
        "CLASS:INT32:1",
        lambda x: {"CLASS": (x["X"].sum(1, keepdims=True) * number).astype(np.int32)},
        8,
    )


_FOREST, _BOOSTED, _LINEAR = (
    _classifier(name, number) for number, name in enumerate(("forest", "boosted", "linear"), 1)
)
_IRIS = {"X": floats([1, 0, 1, 0], [2, 1, 0, 0])}
_FINE = Model("fine", "X:FP32:4", "MESSAGE:BYTES:1", lambda x: {"MESSAGE": texts(*[["SUCCESS"]] * len(x["X"]))}, 8)
_BROKEN = Model("broken", "X:FP32:4", "MESSAGE:BYTES:1", max_batch_size=8, fails="on purpose")
_SUCCESS = {"MESSAGE": texts(["SUCCESS"], ["SUCCESS"])}
_PICKED_ERROR, _PICKED_SUCCESS = {"decision_picker": "ERROR"}, {"decision_picker": "SUCCESS"}


def _classes(number: int, name: str = "CLASS") -> dict[str, np.ndarray]:
    return {name: integers([2 * number], [3 * number])}


def _iris(file: str, source: str, requests: Sequence[Request], *, check: str = "") -> Shape:
    return Shape(f"kserve/{file}.yaml", source, [_FOREST, _BOOSTED, _LINEAR], requests, check=check)


def _failing(file: str, scenario: int, *requests: Request, check: str = "") -> Shape:
    return Shape(f"kserve/{file}.yaml", f"{_E2E} (scenario {scenario})", [_FINE, _BROKEN], requests, check=check)


def _labels(name: str, given: str, gives: str, **labels: str) -> Model:
    """Looks labels up; what it does not know is `other`."""
    return Model(
        name,
        f"{given}:BYTES:1",
        f"{gives}:BYTES:1",
        lambda x: {gives: texts(*([labels.get(text.decode(), "other")] for text in x[given][:, 0]))},
        8,
    )


_ANIMALS = _labels("animals", "IMAGE", "LABEL", rex="dog", tom="cat")
_BREEDS = _labels("breeds", "IMAGE", "LABEL", rex="Kuvasz")
_DOGS = [
    Request({"IMAGE": texts(["rex"])}, {"LABEL": texts(["Kuvasz"])}, called=["animals", "breeds"]),
    Request({"IMAGE": texts(["tom"])}, {"LABEL": texts(["cat"])}, called=["animals"]),
]


def _numbered(name: str, number: int, tensors: str = "COUNT:INT32:1 NAME:BYTES:1") -> Model:
    """Its number for each row."""

    def answer(x: Given) -> Arrays:
        return {"BY": np.full((len(next(iter(x.values()))), 1), number, np.int32)}

    return Model(name, tensors, "BY:INT32:1", answer, 8)


def _body(*rows: tuple[int, str]) -> Arrays:
    return {"COUNT": integers(*([count] for count, _ in rows)), "NAME": texts(*([name] for _, name in rows))}


SHAPES = [
    _iris(
        "same_question_twice",
        f"{_KSERVE}: docs/samples/graph/sequence.yaml",
        [Request(_IRIS, _classes(2))],
    ),
    _iris(
        "three_hard_steps",
        f"{_E2E} (test_inference_graph)",
        [Request(_IRIS, _classes(3), called=["forest", "boosted", "linear"])],
    ),
    _failing("fine_then_broken", 1, Request(_IRIS, error="on purpose")),
    _failing("broken_then_fine", 2, Request(_IRIS, _SUCCESS)),
    _failing("broken_hard", 3, Request(_IRIS, error="on purpose", called=["broken"])),
    _failing(
        "switch_soft",
        4,
        Request(_IRIS, error="on purpose", parameters=_PICKED_ERROR),
        Request(_IRIS, _SUCCESS, parameters=_PICKED_SUCCESS),
        Request(_IRIS, error="INVALID_ARGUMENT", parameters={"decision_picker": "NO_MATCH"}),
        check="it is a request parameter here",
    ),
    _failing("switch_then_fine", 5, Request(_IRIS, _SUCCESS, parameters=_PICKED_ERROR)),
    _failing("switch_hard", 6, Request(_IRIS, error="on purpose", parameters=_PICKED_ERROR, called=["broken"])),
    _failing(
        "ensemble_soft",
        7,
        Request(_IRIS, {"first.MESSAGE": _SUCCESS["MESSAGE"]}),
    ),
    _failing("ensemble_hard", 8, Request(_IRIS, error="on purpose")),
    _failing("splitter_then_fine", 9, Request(_IRIS, _SUCCESS)),
    _failing("splitter_hard", 10, Request(_IRIS, error="on purpose", called=["broken"])),
    _iris(
        "ensemble_of_two",
        f"{_KSERVE}: docs/samples/graph/ensemble.yaml",
        [Request(_IRIS, _classes(1, "forest.CLASS") | _classes(2, "boosted.CLASS"))],
    ),
    _iris(
        "ensemble_of_three",
        f"{_SITE}/overview.md (model-ensemble)",
        [
            Request(
                _IRIS,
                _classes(1, "model_a.CLASS") | _classes(2, "model_b.CLASS") | _classes(3, "model_c.CLASS"),
            )
        ],
    ),
    _iris(
        "splitter_of_two",
        f"{_KSERVE}: docs/samples/graph/splitter.yaml",
        [Request(_IRIS, (_classes(1), _classes(2)))] * 3,
    ),
    _iris(
        "splitter_of_three",
        f"{_SITE}/overview.md (traffic-splitter)",
        [Request(_IRIS, (_classes(1), _classes(2), _classes(3)))] * 3,
    ),
    _iris(
        "split_then_all",
        f"{_SITE}/overview.md (combined-nodes)",
        [Request(_IRIS, _classes(1, "forest.CLASS") | _classes(3, "linear.CLASS"))],
    ),
    Shape(
        "kserve/switch_by_body.yaml",
        f"{_KSERVE}: docs/samples/graph/switch.yaml",
        [_numbered(name, number) for number, name in enumerate(("one", "two", "three"), 1)],
        [
            Request(_body((99, "red-server")), {"BY": integers([1])}, parameters={"source": "client"}),
            Request(_body((11, "red-server")), {"BY": integers([2])}, parameters={"source": "client1"}),
            Request(_body((1, "1red-server1")), {"BY": integers([3])}),
            # There any row decides for all; here a request of several rows is refused.
            Request(_body((0, "kserve"), (1, "1red-server1")), error="the whole request takes one branch"),
            Request(_body((0, "kserve")), error="INVALID_ARGUMENT"),
        ],
        check="it is a request parameter here",
    ),
    Shape(
        "kserve/dog_breeds.yaml",
        f"{_SITE}/image-pipeline/image-pipeline.md, kserve/website: blog/2022-07-21-KServe-0.9-release.md",
        [_ANIMALS, _BREEDS],
        _DOGS,
    ),
    Shape(
        "kserve/dog_breeds_in_time.yaml",
        f"{_SITE}/image-pipeline/image-pipeline.md (timeouts)",
        [_ANIMALS, _BREEDS],
        _DOGS,
    ),
    Shape(
        "kserve/news_and_sports.yaml",
        f"{_SITE}/overview.md (sequential-processing-pipeline)",
        [
            _labels("clean", "TEXT", "TEXT", **{"News": "news", "News!": "news", "Rain": "rain"}),
            _labels("topic", "TEXT", "CLASS", news="news", rain="weather"),
            _labels("summary", "TEXT", "CLASS", **{"News!": "sports", "News": "summary"}),
            _labels("people", "TEXT", "CLASS", **{"News!": "people"}),
        ],
        [
            Request({"TEXT": texts(["Rain"])}, {"CLASS": texts(["weather"])}, called=["clean", "topic"]),
            Request({"TEXT": texts(["News"])}, {"CLASS": texts(["summary"])}, called=["clean", "topic", "summary"]),
            Request({"TEXT": texts(["News!"])}, {"CLASS": texts(["people"])}),
        ],
    ),
    Shape(
        "kserve/three_ranges.yaml",
        f"{_SITE}/overview.md (conditional-routing-pipeline)",
        [_numbered(name, number, "DATA:FP32:1") for number, name in enumerate(("upper", "lower", "between"), 1)],
        refused="G011",
    ),
]
