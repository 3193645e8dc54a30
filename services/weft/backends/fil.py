"""``fil``: gradient boosted trees and forests of XGBoost, LightGBM and scikit-learn, by Treelite on the CPU."""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.contract import FileTensor, check_file
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.base.tensors import Array
from weft.serving.backends.base import RowBackend
from weft.serving.backends.loading import model_file, require
from weft.serving.backends.parameters import ParameterReader

_EXTRA = "trees"
_ALLOW_PICKLE = "WEFT_ALLOW_PICKLE"
_PICKLE = "sklearn_pickle"
#: Default file of each ``model_type``.
_FILES = {
    "xgboost": "xgboost.model", "xgboost_json": "xgboost.json", "xgboost_ubj": "xgboost.ubj", "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl", _PICKLE: "model.pkl",
}  # fmt: skip
#: Parameters of Triton Inference Server's backend that only tune it, or that it ignores by now.
_WITHOUT_EFFECT = (
    "algo", "blocks_per_sm", "chunk_size", "layout", "storage_type", "threads_per_tree", "transfer_threshold",
    "use_experimental_optimizations",
)  # fmt: skip
#: Bits of a LightGBM split that say what a missing value is, and their value where zero is one.
_MISSING_SHIFT, _MISSING_MASK, _ZERO_IS_MISSING = 2, 3, 1
_DECISIONS = re.compile(rb"^decision_type=(.*)$", re.MULTILINE)
#: Treelite's numbers of the tasks of two classes and of more.
_CLASSIFIERS = (0, 2)


class FilBackend(RowBackend):
    """Runs trees as Triton Inference Server's backend of this name, but to the bit as the library that trained them.

    The output is ``output__0``, FP32: classes of a classifier ``[1]``; with ``predict_proba`` its probabilities
    ``[num_classes]``, of two classes ``[1]``, that of the second, or ``[2]``; else the prediction ``[1]``. NaN in
    ``input__0`` is a missing value. Outputs are rounded to FP32 after they were computed as the library does; scores of
    an isolation forest, which are -1 times those of scikit-learn, may differ in the last bit.

    Parameters (all optional):
        model_type: xgboost (default), xgboost_json, xgboost_ubj, lightgbm, treelite_checkpoint or sklearn_pickle. The
            last runs the code that is in the file: only where the environment has ``WEFT_ALLOW_PICKLE=1``.
        is_classifier: Default: whether the model's objective is one. The earlier name is output_class.
        predict_proba: Default false.
        threshold: Of the second class of two, default 0.5.
        cpu_nthread: Threads of one execution. -1: all cores. Default 1, because instances share the machine.
        xgboost_allow_unknown_field: Default false.
    """

    def load(self) -> None:
        """Read the file and check it against the configuration."""
        reader = ParameterReader(self.model)
        kind = reader.choice("model_type", next(iter(_FILES)), tuple(_FILES))
        allows_unknown = reader.flag("xgboost_allow_unknown_field", False)
        path = model_file(self.model, _FILES[kind])
        self._gtil = require("treelite.gtil", _EXTRA)
        self._trees = _read(path, kind, allows_unknown=allows_unknown)
        header = self._trees.get_header_accessor()
        if int(header.get_field("num_target")[0]) != 1:
            raise UnsupportedError(
                f"{path} predicts several targets, which backend 'fil' does not; train a model of each"
            )
        self._link = _make_exact(self._trees)
        is_classifier = int(header.get_field("task_type")[0]) in _CLASSIFIERS
        is_classifier = reader.flag("is_classifier", reader.flag("output_class", is_classifier))
        self._says_class = is_classifier and not reader.flag("predict_proba", False)
        self._threshold = reader.number("threshold", 0.5)
        self._num_threads = reader.integer("cpu_nthread", 1, minimum=-1)
        for name in _WITHOUT_EFFECT:
            reader.text(name, "")
        reader.finish_leniently()
        num_columns = int(header.get_field("num_class")[0])
        declared = self.model.signature.outputs
        self._says_both = is_classifier and num_columns == 1 and [spec.dims for spec in declared] == [(2,)]
        batch = (-1,) if self.model.signature.max_batch_size else ()
        width = 1 if self._says_class else 2 if self._says_both else num_columns
        rows = FileTensor("input__0", "FP32", (*batch, self._trees.num_feature))
        check_file(self.model, path, [rows], [FileTensor("output__0", "FP32", (*batch, width))])

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Predict; releases the GIL."""
        rows = np.ascontiguousarray(inputs["input__0"], self._trees.input_type)
        found = self._gtil.predict(
            self._trees, rows, nthread=self._num_threads, pred_margin=self._link is not None
        ).reshape(num_rows, -1)
        scores = found if self._link is None else self._link(found)
        if self._says_class:
            is_binary = scores.shape[1] == 1
            scores = (scores > self._threshold) if is_binary else scores.argmax(axis=1, keepdims=True)
        elif self._says_both:
            scores = np.concatenate((1 - scores, scores), axis=1)
        return {"output__0": scores.astype(np.float32, copy=False)}

    def can_share_processor(self) -> bool:
        """True with one thread."""
        return self._num_threads == 1

    def close(self) -> None:
        """Free the trees."""
        del self._trees


def _read(path: Path, kind: str, *, allows_unknown: bool) -> Any:
    """The trees of a file. Raises InvalidArgumentError, or UnsupportedError for what would not be exact or not safe."""
    treelite = require("treelite", _EXTRA)
    load = treelite.frontend
    try:
        if kind == "treelite_checkpoint":
            return treelite.Model.deserialize(path)
        if kind == _PICKLE:
            return require("treelite.sklearn", _EXTRA).import_model(_unpickled(path))
        if kind == "lightgbm":
            _check_missing(path)
            return load.load_lightgbm_model(path)
        with path.open("rb") as file:
            is_legacy = kind == "xgboost" and file.read(1) != b"{"
        if is_legacy:
            return load.load_xgboost_model_legacy_binary(path)
        form = {"xgboost_json": "json", "xgboost_ubj": "ubjson"}.get(kind, "inspect")
        return load.load_xgboost_model(path, format_choice=form, allow_unknown_field=allows_unknown)
    except (treelite.TreeliteError, ValueError) as error:
        raise InvalidArgumentError(f"{path} is no model of type '{kind}' that Treelite reads: {error}") from None


def _unpickled(path: Path) -> Any:
    if os.environ.get(_ALLOW_PICKLE) != "1":
        raise UnsupportedError(
            f"{path} is a pickle, which can run any code; save the model as treelite_checkpoint (treelite.sklearn), or "
            f"start the service with {_ALLOW_PICKLE}=1 in its environment"
        )
    try:
        return require("joblib", _EXTRA).load(path)  # which reads plain pickles too
    except Exception as error:  # the file's own code may raise anything
        raise InvalidArgumentError(f"{path} cannot be unpickled: {type(error).__name__}: {error}") from error


def _check_missing(path: Path) -> None:
    for line in _DECISIONS.findall(path.read_bytes()):
        numbers = (int(word) for word in line.split() if word.isdigit())
        if any(number >> _MISSING_SHIFT & _MISSING_MASK == _ZERO_IS_MISSING for number in numbers):
            raise UnsupportedError(
                f"{path} was trained with zero_as_missing, which is not supported; train it with NaN"
            )


def _make_exact(trees: Any) -> Callable[[Array], Array] | None:
    """Make sums and links round as those of the libraries; returns the link to apply to margins, None: Treelite's.

    XGBoost sums from the base score on, in float32: Treelite, which adds it last, differed in 8 of 10 rows. LightGBM
    and scikit-learn compute links in float64, which Treelite does in float32.
    """
    header = trees.get_header_accessor()
    link = header.get_field("postprocessor")
    if trees.input_type == "float64":
        alpha = float(str(header.get_field("sigmoid_alpha")[0]))  # 0.7, of which the file has the nearest float32
        links = {"sigmoid": _sigmoid(alpha), "multiclass_ova": _sigmoid(alpha), "softmax": _softmax}
        return links.get(link)
    base = header.get_field("base_scores").copy()
    if header.get_field("average_tree_output")[0] or list(header.get_field("leaf_vector_shape")) != [1, 1]:
        return None
    if link == "sigmoid":  # XGBoost takes the logarithm in float32
        probability = np.float32(1 / (1 + math.exp(-base[0])))
        base[0] = -math.log(np.float32(1) / probability - np.float32(1))
    first: dict[int, int] = {}
    for index, number in enumerate(header.get_field("class_id").tolist()):
        first.setdefault(max(number, 0), index)
    for column, index in first.items():
        tree = trees.get_tree_accessor(index)
        leaves = tree.get_field("leaf_value")
        is_leaf = tree.get_field("cleft") == -1
        tree.set_field("leaf_value", np.where(is_leaf, leaves + np.float32(base[column]), leaves))
        base[column] = 0
    header.set_field("base_scores", base)
    return None


def _sigmoid(alpha: float) -> Callable[[Array], Array]:
    def sigmoid(margins: Array) -> Array:
        with np.errstate(over="ignore"):  # it is 0 then
            return 1 / (1 + np.exp(-alpha * margins))

    return sigmoid


def _softmax(margins: Array) -> Array:
    powers: Array = np.exp(margins - margins.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers
