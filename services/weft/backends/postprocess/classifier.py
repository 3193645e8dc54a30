"""``softmax`` and ``sigmoid``: from scores to ranked classes with labels."""

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import read_label_file
from weft.base.tensors import Array
from weft.serving.backends.base import ModelContext, RowBackend, check_rows
from weft.serving.backends.loading import only_input, outputs_among
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest

_LAST_INDEX = np.uint64(2**32 - 1)
_INDEX_BITS = np.uint64(32)


class ClassifierBackend(RowBackend):
    """Ranks the most likely classes of each row whose probability reaches a threshold."""

    #: Default of the parameter ``threshold``.
    default_threshold: ClassVar[float]

    #: Whether all classes are listed by default; otherwise only one.
    lists_all: ClassVar[bool]

    #: Whether the probabilities of a row form a distribution, and so have an entropy.
    has_entropy: ClassVar[bool]

    @abstractmethod
    def probabilities(self, scores: Array) -> Array:
        """Probabilities of ``scores``, both float32 ``[num_rows, num_classes]``; raises on invalid scores."""

    def load(self) -> None:
        """Read the parameters and the labels."""
        scores = only_input(self.model, ("FP32", "FP16", "BF16"), (None,))
        self.input, num_classes = scores.name, scores.dims[0]
        parameters = ParameterReader(self.model)
        is_fixed = num_classes > 0
        default_top_k = num_classes if self.lists_all and is_fixed else 1
        self._top_k = parameters.integer(
            "top_k", default_top_k, minimum=1, maximum=num_classes if is_fixed else 2**31 - 1
        )
        self.temperature = np.float32(parameters.number("temperature", 1.0))
        threshold = parameters.numbers("threshold", (self.default_threshold,), size=num_classes if is_fixed else 1)
        filename = parameters.text("labels", label_filename(self.model))
        parameters.finish()
        if self.temperature <= 0:
            raise parameters.fault("temperature", self.temperature, "above 0")
        if min(threshold) < 0 or max(threshold) > 1:
            raise parameters.fault("threshold", ",".join(map(str, threshold)), "from 0 to 1")
        self._threshold = np.array(threshold, np.float32)
        self._outputs = outputs_among(
            self.model,
            {
                "PROBS": (("FP32",), (num_classes,)),
                "TOP_PROBS": (("FP32",), (self._top_k,)),
                "INDEX": (("INT64",), (self._top_k,)),
                "LABEL": (("BYTES",), (self._top_k,)),
                "COUNT": (("INT64",), (1,)),
            }
            | ({"ENTROPY": (("FP32",), (1,))} if self.has_entropy else {}),
        )
        if "LABEL" in self._outputs:
            self._labels = read_labels(self.model, filename, num_classes, self.input)

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """The scores, of at least ``top_k`` classes."""
        scores = self.rows(request, self.input)
        if scores.shape[1] < self._top_k:
            raise InvalidArgumentError(
                f"input '{self.input}' has {scores.shape[1]} scores per row; top_k asks for {self._top_k}"
            )
        return {self.input: scores}

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Compute probabilities, then the best classes."""
        probabilities = self.probabilities(inputs[self.input].astype(np.float32, copy=False))
        if self._outputs.keys() == {"PROBS"}:
            return {"PROBS": probabilities}
        is_listed = probabilities >= self._threshold
        best = top_k(np.where(is_listed, probabilities, np.float32(0)), self._top_k)
        is_best_listed = np.take_along_axis(is_listed, best, axis=1)
        index = np.where(is_best_listed, best, -1)
        outputs: dict[str, Array] = {}
        for name in self._outputs:
            if name == "PROBS":
                outputs[name] = probabilities
            elif name == "TOP_PROBS":
                outputs[name] = np.where(is_best_listed, np.take_along_axis(probabilities, best, axis=1), np.float32(0))
            elif name == "INDEX":
                outputs[name] = index
            elif name == "LABEL":
                outputs[name] = self._labels[index]
            elif name == "ENTROPY":
                logarithms = np.log(np.where(probabilities > 0, probabilities, np.float32(1)))
                outputs[name] = -(probabilities * logarithms).sum(axis=1, keepdims=True)
            else:
                outputs[name] = is_best_listed.sum(axis=1, keepdims=True, dtype=np.int64)
        return outputs


class SoftmaxBackend(ClassifierBackend):
    """Computes the softmax of the scores, and the ``k`` most likely classes, best first.

    ::

        SCORES FP32 [n, C]  ->  PROBS     FP32  [n, C]    p[c] = exp((s[c] - max s) / T) / sum_c exp((s[c] - max s) / T)
                                TOP_PROBS FP32  [n, k]    the k largest p; of equal ones the lower index first
                                INDEX     INT64 [n, k]    their classes
                                LABEL     BYTES [n, k]    their labels
                                COUNT     INT64 [n, 1]    how many of the k reach the threshold
                                ENTROPY   FP32  [n, 1]    -sum_c p[c] ln p[c], in nats; 0: certain, ln C: uniform

    The input may have any name, and also be FP16 or BF16; only declared outputs are computed. Elements
    behind COUNT hold probability 0, class -1 and an empty label. With k = 1, LABEL and TOP_PROBS are a label and its
    confidence.

    Parameters (all optional):
        temperature: T, above 0; larger is flatter. Dimensionless. Default 1.
        top_k: k, 1 to C. Default 1.
        threshold: Classes of smaller probability are not listed; one number from 0 to 1, or one per class,
            comma-separated. Default 0.
        labels: File with one label per line, UTF-8, in the version folder or the model's folder; needed for LABEL only.
            Default: ``label_filename`` of the output LABEL, else ``labels.txt``.

    Scores of a row whose largest is not finite are INVALID_ARGUMENT for their own request alone; -inf beside a finite
    score is probability 0.

    Source:
        Temperature: Guo et al., On Calibration of Modern Neural Networks, https://arxiv.org/abs/1706.04599.
    """

    default_threshold = 0.0
    lists_all = False
    has_entropy = True

    def probabilities(self, scores: Array) -> Array:
        """Softmax of each row."""
        largest = scores.max(axis=1, keepdims=True)
        check_rows(
            np.isfinite(largest), self.input, lambda row: f"the largest score is {largest[row, 0]}; it must be finite"
        )
        with np.errstate(over="ignore"):  # an overflow to -inf gives probability 0
            probabilities: Array = np.exp((scores - largest) / self.temperature)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return probabilities


class SigmoidBackend(ClassifierBackend):
    """Computes the independent probability of each class, and ranks those that reach the threshold.

    ::

        SCORES FP32 [n, C]  ->  PROBS     FP32  [n, C]    p[c] = 1 / (1 + exp(-s[c] / T))
                                TOP_PROBS FP32  [n, k]    the k largest p of at least the threshold, then 0
                                INDEX     INT64 [n, k]    their classes, then -1
                                LABEL     BYTES [n, k]    their labels, then empty
                                COUNT     INT64 [n, 1]    how many of the k there are

    The input may have any name, and also be FP16 or BF16; only declared outputs are computed. Among equal
    probabilities the lower class comes first.

    Parameters (all optional):
        temperature: T, above 0; larger is flatter. Dimensionless. Default 1.
        top_k: k, 1 to C. Default C; 1 where C is declared as -1.
        threshold: Classes of smaller probability are not listed; one number from 0 to 1, or one per class,
            comma-separated. Default 0.5.
        labels: File with one label per line, UTF-8, in the version folder or the model's folder; needed for LABEL only.
            Default: ``label_filename`` of the output LABEL, else ``labels.txt``.

    A score that is NaN is INVALID_ARGUMENT for its own request alone; -inf is probability 0, inf is 1.
    """

    default_threshold = 0.5
    lists_all = True
    has_entropy = False

    def probabilities(self, scores: Array) -> Array:
        """Sigmoid of each score, without overflow."""
        check_rows(
            ~np.isnan(scores), self.input, lambda row: f"nan at [{np.isnan(scores[row]).argmax()}]; send numbers"
        )
        with np.errstate(over="ignore"):  # an overflow to infinity gives the right limit
            scaled = scores / self.temperature
        small = np.exp(-np.abs(scaled))
        probabilities: Array = np.where(scaled >= 0, np.float32(1), small) / (1 + small)
        return probabilities


def top_k(values: Array, k: int) -> Array:
    """Indices of the ``k`` largest values of each row, largest first; among equals the lower index first.

    From float32 ``[num_rows, num_classes]``, none below 0 and none NaN, to int64 ``[num_rows, k]``.
    """
    if k == 1:
        best: Array = values.argmax(axis=1)[:, None]
        return best
    # The bits of non-negative floats sort like the floats. With the index as low bits every key is unique, and a
    # partition is enough: 32 rows of 1000 classes, k 5, take 0.6 ms, a stable sort 1.6 ms (numpy 2.4, AMD EPYC).
    num_classes = values.shape[1]
    bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32).astype(np.uint64)  # -0.0 + 0.0 is 0.0
    keys = (bits << _INDEX_BITS) | (_LAST_INDEX - np.arange(num_classes, dtype=np.uint64))
    if k < num_classes:
        keys = np.partition(keys, num_classes - k, axis=1)[:, num_classes - k :]
    keys = np.sort(keys, axis=1)[:, ::-1]
    indices: Array = (_LAST_INDEX - (keys & _LAST_INDEX)).astype(np.int64)
    return indices


def label_filename(model: ModelContext) -> str:
    """``label_filename`` of the output LABEL, else ``labels.txt``."""
    for output in model.config.get("output", ()):
        if output["name"] == "LABEL" and output.get("label_filename"):
            return str(output["label_filename"])
    return "labels.txt"


def read_labels(model: ModelContext, filename: str, num_classes: int, name: str) -> Array:
    """Labels as an object array of bytes, one per class of the input ``name``, followed by ``b""`` for index -1.

    The file, in the folder of the model or of its version, has one label per line, UTF-8.

    Raises:
        InvalidArgumentError: The file has another number of lines.
        NotFoundError: There is no such file.
    """
    path, labels = read_label_file(model.directory, filename)
    if len(labels) != num_classes:
        raise InvalidArgumentError(
            f"{path} has {len(labels)} labels, but '{name}' has {num_classes} classes; give one line per class and "
            "declare their number"
        )
    return np.array([*labels, b""], np.object_)
