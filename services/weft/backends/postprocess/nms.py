"""``nms``: non-maximum suppression of a detector's boxes."""

import numpy as np

from weft.backends.postprocess.classifier import label_filename, read_labels
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array
from weft.serving.backends.base import Batch, RowBackend, check_finite, check_rows
from weft.serving.backends.loading import check_tensor, outputs_among
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome

_FLOATS = ("FP32", "FP16", "BF16")
_BOXES, _SCORES, _TRANSFORM = "BOXES", "SCORES", "TRANSFORM"
# Scores compared with the threshold at once, so that they fit in the processor's cache.
_MAX_SCORES = 2**20
_PER_DETECTION = {"BOX", "SCORE", "INDEX", "LABEL"}
# Boxes of a row processed at once, and pairs whose overlap is computed at once: both bound memory.
_BLOCK = 128
_MAX_PAIRS = 2**20


class NmsBackend(RowBackend):
    """Selects boxes by greedy non-maximum suppression, best first.

    ::

        BOXES     FP32 [n, N, 4]               ->  BOX    FP32  [n, M, 4]   x1, y1, x2, y2
        SCORES    FP32 [n, N, C] or [n, N]         SCORE  FP32  [n, M]
        TRANSFORM FP32 [n, 4] (optional)      INDEX  INT64 [n, M]      class
                                                   LABEL  BYTES [n, M]
                                                   COUNT  INT64 [n, 1]      how many of the M there are

        IoU(a, b) = area(a and b) / area(a or b)

    Every pair of box and class with a score of at least ``threshold`` is a candidate. The best ``max_candidates`` of a
    row are considered, the first among equals. From best to worst, a candidate is kept unless its IoU with a kept one
    of its class exceeds ``iou_threshold``; the first ``max_detections`` kept ones are returned. With ``class_agnostic``
    each box counts for its best class only, and boxes of all classes suppress each other.

    Inputs may also be FP16 or BF16; only declared outputs are computed. If they are declared with M =
    max_detections, elements behind COUNT are padding: box and score 0, class -1, an empty label. If they are declared
    with -1, a request's outputs are as long as its row with the most detections. TRANSFORM is an output of the backend
    ``image``: boxes are then in pixels of the original image.

    Parameters (all optional):
        threshold: Minimum score; one number, or one per class, comma-separated. Default 0.25.
        iou_threshold: 0 to 1. Default 0.45.
        max_detections: M. Default 100.
        max_candidates: Bounds time and memory, which grow with its square. Default 1000.
        class_agnostic: Default false.
        box_format: ``xyxy``: x1, y1, x2, y2, or ``cxcywh``: centre, width, height. Default xyxy.
        labels: File with one label per line, UTF-8, in the version folder or the model's folder; needed for LABEL only.
            Default: ``label_filename`` of the output LABEL, else ``labels.txt``.

    Numbers that are not finite, a scale of TRANSFORM that is not above 0, and another N of boxes and scores are
    INVALID_ARGUMENT for their own request alone. A box with swapped corners has area 0.

    Source:
        The rules are those of NonMaxSuppression of ONNX (one class at a time) and of ``torchvision.ops.nms``.
    """

    def load(self) -> None:
        """Read the parameters and the labels."""
        self._read_inputs()
        parameters = ParameterReader(self.model)
        num_classes = self._num_classes
        threshold = parameters.numbers("threshold", (0.25,), size=num_classes if num_classes > 0 else 1)
        self._threshold = np.array(threshold, np.float32)
        self._iou_threshold = parameters.number("iou_threshold", 0.45)
        if not 0 <= self._iou_threshold <= 1:
            raise parameters.fault("iou_threshold", self._iou_threshold, "from 0 to 1")
        self._max_detections = parameters.integer("max_detections", 100, minimum=1, maximum=2**16)
        self._max_candidates = parameters.integer("max_candidates", 1000, minimum=1, maximum=2**14)
        self._is_class_agnostic = parameters.flag("class_agnostic", False)
        self._has_centers = parameters.choice("box_format", "xyxy", ("xyxy", "cxcywh")) == "cxcywh"
        filename = parameters.text("labels", label_filename(self.model))
        parameters.finish()
        declared = {spec.dims[0] for spec in self.model.signature.outputs if spec.name in _PER_DETECTION}
        self._is_trimmed = declared == {-1}
        length = -1 if self._is_trimmed else self._max_detections
        self._outputs = outputs_among(
            self.model,
            {
                "BOX": (("FP32",), (length, 4)),
                "SCORE": (("FP32",), (length,)),
                "INDEX": (("INT64",), (length,)),
                "LABEL": (("BYTES",), (length,)),
                "COUNT": (("INT64",), (1,)),
            },
        )
        if "LABEL" in self._outputs:
            self._labels = read_labels(self.model, filename, num_classes, _SCORES)

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """Boxes and scores of equal length, scores with a class axis, and a transform."""
        boxes, scores = self.rows(request, _BOXES), self.rows(request, _SCORES)
        if boxes.shape[1] != scores.shape[1]:
            raise InvalidArgumentError(
                f"'{_BOXES}' has {boxes.shape[1]} boxes and '{_SCORES}' {scores.shape[1]}; the numbers must be equal"
            )
        if _TRANSFORM in request.call.inputs:
            transform = self.rows(request, _TRANSFORM)
        else:
            transform = np.tile(np.array([1, 1, 0, 0], np.float32), (len(boxes), 1))
        if scores.ndim == 2:
            scores = scores[:, :, None]
        if not scores.shape[2]:
            raise InvalidArgumentError(f"'{_SCORES}' has shape {list(scores.shape)}; it needs at least one class")
        return {_BOXES: boxes, _SCORES: scores, _TRANSFORM: transform}

    def execute(self, batch: Batch) -> list[Outcome]:
        """Suppress in all rows at once; each request gets outputs of its own length."""
        outcomes = super().execute(batch)
        axis = 1 if self.model.signature.max_batch_size else 0
        for outcome in outcomes if self._is_trimmed else ():
            if isinstance(outcome, InferenceResponse):
                length = int(outcome.outputs["COUNT"].max(initial=0))
                for name in self._outputs.keys() & _PER_DETECTION:
                    outcome.outputs[name] = outcome.outputs[name].take(range(length), axis)
                if "COUNT" not in self._outputs:
                    del outcome.outputs["COUNT"]
        return outcomes

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Select candidates, suppress, and lay out the detections."""
        boxes, scores, transforms = (
            inputs[name].astype(np.float32, copy=False) for name in (_BOXES, _SCORES, _TRANSFORM)
        )
        check_finite(boxes, _BOXES)
        check_rows(
            np.isfinite(transforms) & np.greater(transforms, [0, 0, -np.inf, -np.inf]),
            _TRANSFORM,
            lambda row: f"{transforms[row].tolist()} must be finite, its scales above 0",
        )
        box, classes, values = self._candidates(scores)
        candidates = np.take_along_axis(boxes, box[:, :, None], axis=1)
        if self._has_centers:
            middle, half = candidates[..., :2], candidates[..., 2:] / 2
            candidates = np.concatenate([middle - half, middle + half], axis=-1)
        groups = np.zeros_like(classes) if self._is_class_agnostic else classes
        keeps = non_max_suppression(
            candidates,
            groups,
            np.isfinite(values),
            iou_threshold=self._iou_threshold,
            limit=self._max_detections,
        )
        order = np.argsort(~keeps, axis=1, kind="stable")[:, : self._max_detections]
        is_detection = np.take_along_axis(keeps, order, axis=1)
        index = np.where(is_detection, np.take_along_axis(classes, order, axis=1), -1)
        scales, offsets = np.tile(transforms[:, None, :2], 2), np.tile(transforms[:, None, 2:], 2)
        found: Array = (np.take_along_axis(candidates, order[:, :, None], axis=1) - offsets) / scales
        given = {
            "BOX": np.where(is_detection[:, :, None], found, np.float32(0)),
            "SCORE": np.where(is_detection, np.take_along_axis(values, order, axis=1), np.float32(0)),
            "INDEX": index,
        }
        length = self._max_detections
        outputs = {name: _padded(given[name], length, -1 if name == "INDEX" else 0) for name in given}
        if "LABEL" in self._outputs:
            outputs["LABEL"] = self._labels[outputs["INDEX"]]
        outputs["COUNT"] = is_detection.sum(axis=1, keepdims=True, dtype=np.int64)
        return {name: outputs[name] for name in [*self._outputs, *(["COUNT"] if self._is_trimmed else [])]}

    def _candidates(self, scores: Array) -> tuple[Array, Array, Array]:
        """Box, class and score of the candidates, each ``[n, K]``, best first; padding has score -inf."""
        num_rows = len(scores)
        step = max(1, _MAX_SCORES // max(1, scores[:1].size))
        parts = [self._over_threshold(scores, start, start + step) for start in range(0, max(1, num_rows), step)]
        rows, box, classes, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        counts = np.bincount(rows, minlength=num_rows)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        laid_out = np.full((num_rows, counts.max(initial=0)), -np.inf, np.float32)
        laid_out[rows, columns] = values
        order = np.argsort(-laid_out, axis=1, kind="stable")[:, : self._max_candidates]
        places = np.zeros(laid_out.shape, np.int64)
        places[rows, columns] = np.arange(len(rows))
        places = np.take_along_axis(places, order, axis=1)
        if not len(rows):
            return places, places, np.take_along_axis(laid_out, order, axis=1)
        return box[places], classes[places], np.take_along_axis(laid_out, order, axis=1)

    def _over_threshold(self, scores: Array, start: int, stop: int) -> tuple[Array, Array, Array, Array]:
        """Row, box, class and score of every candidate in rows ``start`` to ``stop``, in the order of the scores."""
        part = scores[start:stop]
        if not np.isfinite(part).all():
            check_finite(scores, _SCORES)
        _, num_boxes, num_classes = part.shape
        if not self._is_class_agnostic:
            places = np.flatnonzero(part >= self._threshold)
            box, classes = np.divmod(places, num_classes)
        else:
            best = part.argmax(axis=2)
            part = np.take_along_axis(part, best[:, :, None], axis=2)[:, :, 0]
            places = np.flatnonzero(part >= self._threshold[best if self._threshold.size > 1 else 0])
            box, classes = places, best.ravel()[places]
        rows, box = np.divmod(box, max(1, num_boxes))
        return rows + start, box, classes, part.ravel()[places]

    def _read_inputs(self) -> None:
        inputs = {spec.name: spec for spec in self.model.signature.inputs}
        if inputs.keys() - {_TRANSFORM} != {_BOXES, _SCORES}:
            raise self.model.fault(
                "input",
                f"model '{self.model.signature.name}' must have the inputs '{_BOXES}' and '{_SCORES}', and may have "
                f"'{_TRANSFORM}' beside them, got {', '.join(inputs)}",
            )
        check_tensor(self.model, inputs[_BOXES], _FLOATS, (None, 4))
        if _TRANSFORM in inputs:
            check_tensor(self.model, inputs[_TRANSFORM], ("FP32",), (4,))
        scores = inputs[_SCORES]
        check_tensor(self.model, scores, _FLOATS, (None,) if len(scores.dims) == 1 else (None, None))
        self._num_classes = 1 if len(scores.dims) == 1 else scores.dims[1]


def _padded(array: Array, length: int, value: int) -> Array:
    """Pad ``array`` ``[n, m, ...]`` with ``value`` to ``[n, length, ...]``."""
    missing = length - array.shape[1]
    if not missing:
        return array
    return np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)], constant_values=value)


def non_max_suppression(boxes: Array, groups: Array, is_valid: Array, *, iou_threshold: float, limit: int) -> Array:
    """Greedy non-maximum suppression: which boxes are kept, bool ``[num_rows, K]``.

    From first to last, a box is kept unless its overlap with a kept one of its group exceeds the threshold.

    Args:
        boxes: float32 ``[num_rows, K, 4]`` as x1, y1, x2, y2, best first.
        groups: ``[num_rows, K]``; boxes of different groups do not suppress each other.
        is_valid: bool ``[num_rows, K]``; invalid boxes are neither kept nor suppress others.
        iou_threshold: Overlap is area of the intersection by area of the union; 0 if both are empty.
        limit: Results are correct up to this many kept boxes per row, and arbitrary behind them.
    """
    step = max(1, _MAX_PAIRS // (_BLOCK * max(_BLOCK, limit)))
    keeps = np.zeros_like(is_valid)
    for start in range(0, len(boxes), step):
        part = slice(start, start + step)
        _suppress_rows(boxes[part], groups[part], is_valid[part], keeps[part], iou_threshold, limit)
    return keeps


def _suppress_rows(
    boxes: Array, groups: Array, is_valid: Array, keeps: Array, iou_threshold: float, limit: int
) -> None:
    """Fill ``keeps`` block by block: first against boxes kept in earlier blocks, then within the block."""
    for start in range(0, boxes.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        num_kept = keeps[:, :start].sum(axis=1)
        if num_kept.min(initial=limit) >= limit:
            return
        candidates, own_groups, is_open = boxes[:, block], groups[:, block], is_valid[:, block]
        if start:
            earlier = np.argsort(~keeps[:, :start], axis=1, kind="stable")[:, : min(limit, num_kept.max())]
            suppresses = _suppresses(
                np.take_along_axis(boxes, earlier[:, :, None], axis=1),
                np.take_along_axis(groups, earlier, axis=1),
                candidates,
                own_groups,
                iou_threshold,
            )
            suppresses &= np.take_along_axis(keeps, earlier, axis=1)[:, :, None]
            is_open = is_open & ~suppresses.any(axis=1)
        suppresses = np.triu(_suppresses(candidates, own_groups, candidates, own_groups, iou_threshold), 1)
        keeps[:, block] = _greedy(suppresses, is_open)


def _greedy(suppresses: Array, is_open: Array) -> Array:
    """The unique selection, bool ``[num_rows, i]``: an open box is kept iff no kept box before it suppresses it.

    ``suppresses`` is bool ``[num_rows, j, i]``, only for j before i. Fixed-point iteration: each round settles all
    boxes whose suppressors are settled, so the number of rounds is the length of the longest chain of suppressions,
    usually three or four.
    """
    keeps = is_open
    while True:
        changed = is_open & ~(suppresses & keeps[:, :, None]).any(axis=1)
        if (changed == keeps).all():
            return changed
        keeps = changed


def _suppresses(boxes: Array, groups: Array, candidates: Array, other_groups: Array, iou_threshold: float) -> Array:
    """Whether each pair is of one group and overlaps above the threshold: bool ``[num_rows, boxes, candidates]``."""
    x1, y1, x2, y2 = (boxes[:, :, None, i] for i in range(4))
    u1, v1, u2, v2 = (candidates[:, None, :, i] for i in range(4))
    intersections = np.maximum(np.minimum(x2, u2) - np.maximum(x1, u1), 0)
    intersections *= np.maximum(np.minimum(y2, v2) - np.maximum(y1, v1), 0)
    areas = np.maximum(x2 - x1, 0) * np.maximum(y2 - y1, 0)
    other_areas = np.maximum(u2 - u1, 0) * np.maximum(v2 - v1, 0)
    # Without a division: both sides are 0 where the union is empty.
    is_over: Array = intersections > iou_threshold * (areas + other_areas - intersections)
    is_over &= groups[:, :, None] == other_groups[:, None, :]
    return is_over
