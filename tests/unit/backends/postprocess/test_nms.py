"""The ``nms`` transform against a plain loop."""

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS

LABELS = ["cat", "dog", "größe"]


def _outputs(length=10):
    return {
        "BOX": ("FP32", (length, 4)),
        "SCORE": ("FP32", (length,)),
        "INDEX": ("INT64", (length,)),
        "LABEL": ("BYTES", (length,)),
        "COUNT": ("INT64", (1,)),
    }


def _inputs(num_classes=3, *, transform=False):
    inputs = {"BOXES": ("FP32", (-1, 4)), "SCORES": ("FP32", (-1, num_classes))}
    return inputs | ({"TRANSFORM": ("FP32", (4,))} if transform else {})


@pytest.fixture
def nms(version_folder, make_model_context):
    """Makes a loaded transform over three classes."""
    (version_folder / "labels.txt").write_text("\n".join(LABELS), encoding="utf-8")

    def make(inputs=None, outputs=None, **options):
        options = {"max_detections": "10"} | options
        model = make_model_context(inputs or _inputs(), outputs or _outputs(), **options)
        return load_backend(BACKENDS["nms"], model)

    return make


def _case(num_rows, num_boxes, num_classes=3, seed=0):
    """Boxes in clusters, so that they overlap, and scores with ties."""
    random = np.random.default_rng(seed)
    corner = random.integers(0, 6, (num_rows, num_boxes, 2)) * 10 + random.normal(size=(num_rows, num_boxes, 2)) * 3
    size = random.uniform(5, 20, (num_rows, num_boxes, 2))
    boxes = np.concatenate([corner, corner + size], axis=2).astype(np.float32)
    scores = (random.integers(0, 50, (num_rows, num_boxes, num_classes)) / 50).astype(np.float32)
    return boxes, scores


def _iou(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    areas = [max(box[2] - box[0], 0) * max(box[3] - box[1], 0) for box in (a, b)]
    return both / (sum(areas) - both) if sum(areas) > 0 else 0


def _loop(boxes, scores, *, threshold, iou_threshold, max_detections, max_candidates=1000, agnostic=False):
    """The detections of one row as (box, class), one candidate after another."""
    pairs = [(i, c) for i in range(len(boxes)) for c in range(scores.shape[1])]
    if agnostic:
        pairs = [(i, int(scores[i].argmax())) for i in range(len(boxes))]
    limits = np.broadcast_to(threshold, scores.shape[1])
    pairs = [pair for pair in pairs if scores[pair] >= np.float32(limits[pair[1]])]
    pairs = sorted(pairs, key=lambda pair: -scores[pair])[:max_candidates]
    found = []
    for i, c in pairs:
        rivals = [k for k, other in found if agnostic or other == c]
        if all(_iou(boxes[i], boxes[k]) <= iou_threshold for k in rivals):
            found.append((i, c))
    return found[:max_detections]


def _check(outputs, row, found, boxes, scores):
    count = len(found)
    assert [count] == outputs["COUNT"][row].tolist()
    np.testing.assert_array_equal(outputs["INDEX"][row, :count], [c for _, c in found])
    np.testing.assert_array_equal(outputs["SCORE"][row, :count], [scores[i, c] for i, c in found])
    np.testing.assert_allclose(
        outputs["BOX"][row, :count], np.reshape([boxes[i] for i, _ in found], (-1, 4)), rtol=1e-6
    )
    assert [LABELS[c].encode() for _, c in found] == outputs["LABEL"][row, :count].tolist()
    assert (outputs["INDEX"][row, count:] == -1).all()
    assert not outputs["BOX"][row, count:].any()
    assert not outputs["SCORE"][row, count:].any()
    assert (outputs["LABEL"][row, count:] == b"").all()


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("threshold", ["0.25", "0.9", "0", "0.2,0.5,0.8"])
@pytest.mark.parametrize("iou_threshold", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("num_boxes", [1, 37])
def test_detections_are_those_of_a_loop(nms, agnostic, threshold, iou_threshold, num_boxes):
    """Class by class and over all classes, at any thresholds, the rows equal a loop over sorted candidates."""
    boxes, scores = _case(5, num_boxes)
    backend = nms(threshold=threshold, iou_threshold=str(iou_threshold), class_agnostic=str(agnostic))
    (outcome,) = execute_batch(backend, make_served_request(BOXES=boxes, SCORES=scores))
    limits = [float(number) for number in threshold.split(",")]
    for row in range(5):
        found = _loop(
            boxes[row],
            scores[row],
            threshold=limits,
            iou_threshold=iou_threshold,
            max_detections=10,
            agnostic=agnostic,
        )
        _check(outcome.outputs, row, found, boxes[row], scores[row])


@pytest.mark.parametrize("max_detections", [1, 10, 64])
@pytest.mark.parametrize(("block", "max_pairs"), [(128, 2**20), (7, 2**20), (1, 1), (7, 200)])
def test_many_boxes_are_compared_in_parts(nms, monkeypatch, block, max_pairs, max_detections):
    """However many rows and boxes are compared at a time, the detections are the same."""
    monkeypatch.setattr("weft.backends.postprocess.nms._BLOCK", block)
    monkeypatch.setattr("weft.backends.postprocess.nms._MAX_PAIRS", max_pairs)
    monkeypatch.setattr("weft.backends.postprocess.nms._MAX_SCORES", max_pairs)
    boxes, scores = _case(4, 100, seed=2)
    boxes[1] = boxes[1, :1]
    backend = nms(outputs=_outputs(max_detections), max_detections=str(max_detections))
    (outcome,) = execute_batch(backend, make_served_request(BOXES=boxes, SCORES=scores))
    for row in range(4):
        found = _loop(boxes[row], scores[row], threshold=0.25, iou_threshold=0.45, max_detections=max_detections)
        _check(outcome.outputs, row, found, boxes[row], scores[row])


def test_suppressed_box_suppresses_nothing(nms, monkeypatch):
    """In a chain of boxes each overlaps the next one; every other one is kept, whatever the other rows keep."""
    monkeypatch.setattr("weft.backends.postprocess.nms._BLOCK", 2)
    starts = np.stack([np.arange(8) * 3, np.arange(8) * 50])
    boxes = np.stack([starts, starts * 0, starts + 10, starts * 0 + 10], axis=2).astype(np.float32)
    scores = np.tile(np.linspace(0.9, 0.5, 8, dtype=np.float32)[:, None], (2, 1, 1))
    inputs = _inputs() | {"SCORES": ("FP32", (-1, 1))}
    backend = nms(inputs, {"BOX": ("FP32", (-1, 4)), "COUNT": ("INT64", (1,))})
    (outcome,) = execute_batch(backend, make_served_request(BOXES=boxes, SCORES=scores))
    assert [[4], [8]] == outcome.outputs["COUNT"].tolist()
    assert [0, 6, 12, 18] == outcome.outputs["BOX"][0, :4, 0].tolist()


def test_only_the_best_candidates_go_on(nms):
    """With max_candidates 4 what comes fifth is neither kept nor suppresses."""
    boxes, scores = _case(3, 30, seed=3)
    (outcome,) = execute_batch(nms(max_candidates="4"), make_served_request(BOXES=boxes, SCORES=scores))
    for row in range(3):
        found = _loop(boxes[row], scores[row], threshold=0.25, iou_threshold=0.45, max_detections=10, max_candidates=4)
        _check(outcome.outputs, row, found, boxes[row], scores[row])


def test_requests_of_a_batch_get_their_own_rows(nms):
    """Rows of two requests are handled together and handed back apart, each as long as its own detections need."""
    cases = [_case(2, 20, seed=4), _case(1, 20, seed=5)]
    cases[1][1][:] = 0
    cases[1][1][0, 7, 2] = 0.9
    backend = nms(outputs={name: spec for name, spec in _outputs(-1).items() if name != "COUNT"})
    outcomes = execute_batch(backend, *(make_served_request(BOXES=b, SCORES=s) for b, s in cases))
    longest = max(
        len(_loop(b, s, threshold=0.25, iou_threshold=0.45, max_detections=10)) for b, s in zip(*cases[0], strict=True)
    )
    assert (2, longest, 4) == outcomes[0].outputs["BOX"].shape
    assert ["BOX", "SCORE", "INDEX", "LABEL"] == list(outcomes[1].outputs)
    assert [[2]] == outcomes[1].outputs["INDEX"].tolist()
    np.testing.assert_array_equal(outcomes[1].outputs["BOX"], cases[1][0][:, 7:8])


def test_centres_become_corners(nms):
    """With box_format cxcywh the answer is in corners, and the same as for the corners themselves."""
    boxes, scores = _case(2, 20, seed=6)
    centres = np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], axis=2)
    (expected,) = execute_batch(nms(), make_served_request(BOXES=boxes, SCORES=scores))
    (outcome,) = execute_batch(nms(box_format="cxcywh"), make_served_request(BOXES=centres, SCORES=scores))
    np.testing.assert_array_equal(expected.outputs["INDEX"], outcome.outputs["INDEX"])
    np.testing.assert_allclose(expected.outputs["BOX"], outcome.outputs["BOX"], rtol=1e-4, atol=1e-4)


def test_boxes_go_back_to_the_picture(nms):
    """With a TRANSFORM the boxes are in pixels of the picture before it was resized."""
    boxes, scores = _case(2, 20, seed=7)
    transform = np.array([[0.5, 0.25, 3, -4], [2, 2, 0, 0]], np.float32)
    (plain,) = execute_batch(nms(), make_served_request(BOXES=boxes, SCORES=scores))
    (outcome,) = execute_batch(
        nms(_inputs(transform=True)), make_served_request(BOXES=boxes, SCORES=scores, TRANSFORM=transform)
    )
    for row, (scale_x, scale_y, offset_x, offset_y) in enumerate(transform):
        count = plain.outputs["COUNT"][row, 0]
        back = outcome.outputs["BOX"][row, :count] * [scale_x, scale_y, scale_x, scale_y]
        back += [offset_x, offset_y, offset_x, offset_y]
        np.testing.assert_allclose(plain.outputs["BOX"][row, :count], back, rtol=1e-4, atol=1e-3)


def test_scores_may_have_no_classes(nms):
    """Scores [n, N] are those of one class; with max_batch_size 0 nothing has a batch dimension."""
    boxes, scores = _case(1, 20, num_classes=1, seed=8)
    inputs = _inputs() | {"SCORES": ("FP32", (-1,))}
    outputs = {"BOX": ("FP32", (-1, 4)), "COUNT": ("INT64", (1,))}
    backend = nms(inputs, outputs, max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(BOXES=boxes[0], SCORES=scores[0, :, 0]))
    found = _loop(boxes[0], scores[0], threshold=0.25, iou_threshold=0.45, max_detections=10)
    np.testing.assert_array_equal(outcome.outputs["BOX"], [boxes[0, i] for i, _ in found])
    assert [len(found)] == outcome.outputs["COUNT"].tolist()
