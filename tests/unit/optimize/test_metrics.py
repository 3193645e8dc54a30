"""Scores of answers, by metric."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.optimize.metrics import MetricOptions, make_metric
from weft.optimize.rows import DataRows, RowAnswers

LABEL, PROBS = TensorSpec("LABEL", "INT64", (1,)), TensorSpec("PROBS", "FP32", (3,))
TEXT = TensorSpec("TEXT", "BYTES", (1,))


def options(*outputs: TensorSpec, **rest: Any) -> MetricOptions:
    """Of a graph with one text as its input."""
    return MetricOptions(
        ModelSignature(name="g", version="1", platform="graph", max_batch_size=32, inputs=(TEXT,), outputs=outputs),
        {},
        **rest,
    )


def answers(**outputs: Any) -> RowAnswers:
    """To adjacent rows."""
    arrays = {name: np.array(values) for name, values in outputs.items()}
    return RowAnswers(np.arange(len(next(iter(arrays.values())))), arrays, ())


def rows(num_rows: int, **columns: list[Any]) -> DataRows:
    """With columns, or one without meaning."""
    return DataRows(columns or {"TEXT": [""] * num_rows}, False, "data.jsonl")


def test_the_graph_decides_what_suits_it() -> None:
    """A class is compared as such, else a vector by its direction."""
    assert "agreement" == make_metric("", options(PROBS, LABEL)).name
    assert "cosine" == make_metric("", options(PROBS)).name
    with pytest.raises(InvalidArgumentError, match="judge with a function of your own"):
        make_metric("", options(TensorSpec("X", "FP32", (1,))))


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("cosin", options(PROBS), "unknown --metric 'cosin'; did you mean 'cosine'"),
        ("cosine", options(LABEL), "no output of 'g' is a vector"),
        (
            "cosine",
            options(PROBS, TensorSpec("B", "FP16", (2,))),
            "several outputs to judge: PROBS, B; choose by --output",
        ),
        ("cosine", options(PROBS, LABEL, output="LABEL"), "--output 'LABEL' of 'g' is not a vector"),
        ("none.py:f", options(PROBS), "not of the form FILE.py:function, or there is no such file"),
        ("retrieval", options(LABEL), "no output"),
    ],
)
def test_a_metric_that_does_not_fit_is_told(name: str, given: MetricOptions, told: str) -> None:
    """With the cure."""
    with pytest.raises(InvalidArgumentError, match=told):
        make_metric(name, given)


def test_cosines_are_of_the_angle_alone() -> None:
    """Lengths do not matter; two vectors of length 0 are the same, one is not."""
    first = answers(PROBS=[[1, 0], [1, 0], [0, 0], [1, 0]])
    second = answers(PROBS=[[5, 0], [1, 1], [0, 0], [0, 0]])
    scores = make_metric("cosine", options(PROBS)).scores([first], [second], rows(4))
    assert np.allclose([1, np.sqrt(0.5), 1, 0], scores.candidate)
    assert np.array_equal(np.ones(4), scores.original)


def test_an_answer_that_is_no_number_makes_no_finite_score() -> None:
    """The gate refuses it."""
    good, bad = answers(PROBS=[[1.0, 0.0]]), answers(PROBS=[[np.nan, 0.0]])
    assert not np.isfinite(make_metric("cosine", options(PROBS)).scores([good], [bad], rows(1)).candidate).any()


def test_agreement_is_with_the_original_or_with_labels() -> None:
    """Labels may be written in any way; without a class the largest element of a vector is it."""
    first, second = answers(LABEL=[[1], [2], [3]]), answers(LABEL=[[1], [0], [3]])
    plain = make_metric("agreement", options(LABEL)).scores([first], [second], rows(3))
    assert ([1, 1, 1], [1, 0, 1]) == (plain.original.tolist(), plain.candidate.tolist())
    metric = make_metric("agreement", options(LABEL, label="y"))
    labelled = metric.scores([first], [second], rows(3, y=["1", 0.0, True]))
    assert ([1, 0, 0], [1, 1, 0]) == (labelled.original.tolist(), labelled.candidate.tolist())
    with pytest.raises(InvalidArgumentError, match="no answer of the original is its label in 'y'"):
        metric.scores([first], [second], rows(3, y=["a", "b", "c"]))
    vectors = [answers(PROBS=[[0.1, 0.9]]), answers(PROBS=[[0.6, 0.4]])]
    assert [0] == make_metric("agreement", options(PROBS)).scores(vectors[:1], vectors[1:], rows(1)).candidate.tolist()


def test_classes_that_are_texts_are_compared_as_such() -> None:
    """BYTES of one element a row."""
    spec = TensorSpec("ROUTE", "BYTES", (1,))
    made = [RowAnswers(np.arange(2), {"ROUTE": np.array([[b"a"], [other]], object)}, ()) for other in (b"b", b"c")]
    assert [1, 0] == make_metric("", options(spec)).scores(made[:1], made[1:], rows(2)).candidate.tolist()


@pytest.mark.parametrize("scale", [1, 1000])
def test_log_loss_is_of_the_right_class(scale: float) -> None:
    """In nats; what is no distribution is taken for logits; certainty costs a finite amount."""
    even, sure = answers(PROBS=[[0.5, 0.5]]), answers(PROBS=[[1.0, 0.0]])
    scores = make_metric("loss", options(PROBS, label="y")).scores([even], [sure], rows(1, y=[1]))
    assert scores.original[0] == pytest.approx(np.log(0.5))
    assert np.isfinite(scores.candidate[0])
    assert scores.candidate[0] < -10
    logits = answers(PROBS=[[2.0 * scale, 2.0 * scale]])
    same = make_metric("loss", options(PROBS)).scores([even], [logits], rows(1))
    assert same.original[0] == pytest.approx(same.candidate[0])
    with pytest.raises(InvalidArgumentError, match="label '2' in 'y' is no class of 'PROBS', which has 0 to 1"):
        make_metric("loss", options(PROBS, label="y")).scores([even], [sure], rows(1, y=[2]))


def test_retrieval_ranks_the_positive_among_all() -> None:
    """NDCG of one relevant text is 1 / log2(1 + rank), and 0 behind the tenth place; equal texts are no rivals."""
    metric = make_metric("retrieval", options(PROBS))
    assert [{}, {"TEXT": "positive"}] == list(metric.passes)
    queries = np.eye(12)[:, :3].copy()
    queries[:] = [1, 0, 0]
    positives = np.array([[1, 0.1 * i, 0] for i in range(12)])
    scores = metric.scores(
        [answers(PROBS=queries), answers(PROBS=positives)],
        [answers(PROBS=queries), answers(PROBS=positives[:1].repeat(12, axis=0))],
        rows(12),
    )
    assert scores.original[:3] == pytest.approx([1, 1 / np.log2(3), 0.5])
    assert ([0.0, 0.0], [1.0] * 12) == (scores.original[10:].tolist(), scores.candidate.tolist())


def test_a_function_of_the_user_computes_the_loss(tmp_path: Path) -> None:
    """Of each row; what goes wrong in it is told as its own."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def halves(original, candidate, rows):\n    return [x / 2 for x in rows['y']]\n"
        "def one(original, candidate, rows):\n    return 0.5\n"
        "def raises(original, candidate, rows):\n    return original['NONE']\n"
        "number = 3\n"
    )

    def judged(name: str) -> Mapping[str, Any]:
        metric = make_metric(f"{file}:{name}", options(PROBS, label="y"))
        made = answers(PROBS=[[1.0, 0.0], [1.0, 0.0]])
        return metric.scores([made], [made], rows(2, y=[1.0, 3.0]))._asdict()

    assert [-0.5, -1.5] == judged("halves")["candidate"].tolist()
    with pytest.raises(InvalidArgumentError, match=r"a loss for each of 2 rows, got an array of shape \[\]"):
        judged("one")
    with pytest.raises(InvalidArgumentError, match="failed: KeyError: 'NONE'"):
        judged("raises")
    for name in ("number", "absent"):
        with pytest.raises(InvalidArgumentError, match=f"has no function '{name}'"):
            judged(name)
    file.write_text("raise SystemExit(3)")
    with pytest.raises(InvalidArgumentError, match="SystemExit: 3"):
        judged("halves")
