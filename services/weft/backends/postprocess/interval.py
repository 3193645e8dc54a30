"""``interval``: prediction intervals with a given coverage."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np

from weft.backends.contract import inputs_among
from weft.backends.postprocess.distribution import LINKS, positive
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array
from weft.serving.backends.base import RowBackend, check_finite
from weft.serving.backends.loading import array_file, check_tensor, outputs_among
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest

_FLOATS = ("FP32", "FP64")
#: Required and optional inputs of each method.
_INPUTS = {
    "conformal": (("PREDICTION",), ("SCALE",)),
    "conformal_quantile": (("QUANTILES",), ()),
    "gaussian": (("MEAN", "VARIANCE"), ()),
    "quantile": (("QUANTILES",), ()),
}


class IntervalBackend(RowBackend):
    """Computes the lower and the upper end of a prediction interval.

    ::

        method              inputs, FP32 or FP64                     LOWER, UPPER FP32 [n, D]
        gaussian            MEAN [n, D], VARIANCE [n, D]             mean -+ z * sqrt(variance)
        quantile            QUANTILES [n, D, Q] or, D = 1, [n, Q]    quantiles at (1 -+ coverage) / 2
        conformal           PREDICTION [n, D]                        prediction -+ w
                            PREDICTION [n, D], SCALE [n, D]          prediction -+ w * scale
        conformal_quantile  QUANTILES as above                       quantiles at (1 -+ coverage) / 2, -+ w

    ``z`` is the quantile of the normal distribution at (1 + coverage) / 2. Quantiles between two ``levels`` are
    interpolated; crossing quantiles of a row are sorted first. ``w`` comes from held-out rows that are exchangeable
    with future ones: of their m scores it is the one at rank ceil((m + 1) * coverage) in ascending order, so that the
    interval covers at least that share of true values, whatever the model and the distribution. The score of a row is

    ::

        conformal            |target - prediction|   (/ scale, if the input SCALE is declared)
        conformal_quantile   max(lower - target, target - upper)        may be below 0: the interval then shrinks

    For the conformal methods the version folder holds ``calibration.json`` or ``calibration.npz`` (or
    ``default_model_filename``) with ``target`` [m, D] and the model's outputs for these rows: ``prediction`` [m, D]
    and optionally ``scale`` [m, D], or ``quantiles`` [m, D, Q].

    Parameters (``method`` required):
        method: ``gaussian``, ``quantile``, ``conformal`` or ``conformal_quantile``.
        coverage: Between 0 and 1. Default 0.9.
        levels: For QUANTILES: the Q levels, ascending, comma-separated.
        link: Function that maps VARIANCE and SCALE to values: ``identity``, ``exp`` or ``softplus``. Default
            identity. Not applied to the calibration file.

    Numbers that are not finite, and a variance or scale below 0, are INVALID_ARGUMENT for their own request alone.

    Source:
        Split conformal: Lei et al., https://arxiv.org/abs/1604.04173. Conformalized quantiles: Romano, Patterson and
        Candes, https://arxiv.org/abs/1905.03222. Sorting: Chernozhukov et al., https://arxiv.org/abs/0704.3649.
    """

    def load(self) -> None:
        """Read the parameters and the calibration, and validate them against the declared tensors."""
        parameters = ParameterReader(self.model)
        self._method = parameters.choice("method", "", tuple(_INPUTS))
        self._coverage = parameters.number("coverage", 0.9)
        if not 0 < self._coverage < 1:
            raise parameters.fault("coverage", self._coverage, "between 0 and 1")
        self._link = parameters.choice("link", "identity", tuple(LINKS))
        self._has_quantiles = "QUANTILES" in _INPUTS[self._method][0]
        levels = parameters.numbers("levels", ()) if self._has_quantiles else ()
        parameters.finish()
        self._read_inputs()
        if self._has_quantiles:
            self._read_levels(parameters, levels)
        self._outputs = outputs_among(self.model, dict.fromkeys(("LOWER", "UPPER"), (("FP32",), (self._num_targets,))))
        self._z = NormalDist().inv_cdf((1 + self._coverage) / 2)
        self._width = np.zeros(self._num_targets)
        if self._method.startswith("conformal"):
            self._width = self._calibrated()

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """The inputs in float64; quantiles ``[n, D, Q]``."""
        arrays = {name: array.astype(np.float64) for name, array in super().prepare(request).items()}
        if self._has_quantiles:
            arrays["QUANTILES"] = arrays["QUANTILES"].reshape(-1, self._num_targets, self._num_levels)
        return arrays

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Compute the declared ends."""
        lower, upper = self._ends(inputs)
        ends = {"LOWER": lower, "UPPER": upper}
        return {name: ends[name].astype(np.float32) for name in self._outputs}

    def _ends(self, inputs: dict[str, Array]) -> tuple[Array, Array]:
        """Float64 ``[n, D]`` each."""
        if self._has_quantiles:
            check_finite(inputs["QUANTILES"], "QUANTILES")
            lower, upper = self._interpolated(inputs["QUANTILES"])
            lower, upper = lower - self._width, upper + self._width
            middle = (lower + upper) / 2  # collapse an interval whose ends crossed
            return np.minimum(lower, middle), np.maximum(upper, middle)
        if self._method == "gaussian":
            center, half = inputs["MEAN"], self._z * np.sqrt(positive(inputs["VARIANCE"], "VARIANCE", self._link))
            check_finite(center, "MEAN")
        else:
            center = inputs["PREDICTION"]
            check_finite(center, "PREDICTION")
            half = np.broadcast_to(self._width, center.shape)
            if "SCALE" in inputs:
                half = half * positive(inputs["SCALE"], "SCALE", self._link)
        return center - half, center + half

    def _interpolated(self, quantiles: Array) -> tuple[Array, Array]:
        ordered = np.sort(quantiles, axis=-1)
        return self._lower_weights(ordered), self._upper_weights(ordered)

    def _read_inputs(self) -> None:
        required, optional = _INPUTS[self._method]
        inputs = inputs_among(self.model, f"method '{self._method}'", required, optional)
        dims = inputs[required[0]].dims
        if -1 in dims:
            raise self.model.error("input", f"'{required[0]}' must have fixed dims, got {list(dims)}")
        for spec in inputs.values():
            allowed = (None, None) if self._has_quantiles and len(dims) == 2 else (dims[0],)
            check_tensor(self.model, spec, _FLOATS, allowed)
        self._num_targets = dims[0] if not self._has_quantiles else (dims[0] if len(dims) == 2 else 1)
        self._num_levels = dims[-1]

    def _read_levels(self, parameters: ParameterReader, levels: tuple[float, ...]) -> None:
        text = ",".join(map(str, levels))
        is_ascending = list(levels) == sorted(set(levels)) and 0 < levels[0] <= levels[-1] < 1
        if len(levels) != self._num_levels or not is_ascending:
            allowed = f"{self._num_levels} ascending numbers between 0 and 1, one for each of QUANTILES"
            raise parameters.fault("levels", text, allowed)
        low, high = (1 - self._coverage) / 2, (1 + self._coverage) / 2
        if levels[0] > low + 1e-9 or levels[-1] < high - 1e-9:
            raise parameters.fault("levels", text, f"from at most {low:.6g} to at least {high:.6g} for this coverage")
        self._lower_weights, self._upper_weights = (_interpolation(levels, level) for level in (low, high))

    def _calibrated(self) -> Array:
        """``w``, float64 ``[D]``."""
        file = array_file(self.model, "calibration")
        targets = file.numbers("target", (-1, self._num_targets))
        if self._has_quantiles:
            quantiles = file.numbers("quantiles", (len(targets), self._num_targets, self._num_levels))
            lower, upper = self._interpolated(quantiles)
            scores = np.maximum(lower - targets, targets - upper)
        else:
            scores = np.abs(targets - file.numbers("prediction", targets.shape))
            if any(spec.name == "SCALE" for spec in self.model.signature.inputs):
                scores /= np.maximum(file.numbers("scale", targets.shape), np.finfo(np.float64).tiny)
        file.finish()
        return calibrated_width(scores, self._coverage, file.path)


def _interpolation(levels: tuple[float, ...], level: float) -> Callable[[Array], Array]:
    """A function that interpolates the value at ``level`` from values at ``levels`` along the last axis."""
    right = min(max(1, int(np.searchsorted(levels, level))), len(levels) - 1)
    left = max(right - 1, 0)
    span = levels[right] - levels[left]
    share = min(max((level - levels[left]) / span, 0.0), 1.0) if span else 0.0
    if math.isclose(share, round(share), abs_tol=1e-9):
        share = float(round(share))
    return lambda values: (1 - share) * values[..., left] + share * values[..., right]


def calibrated_width(scores: Array, coverage: float, path: Path) -> Array:
    """The score at rank ``ceil((m + 1) * coverage)`` in ascending order, for each column of float64 ``[m, D]``.

    A new score that is exchangeable with the m scores of a column is at most this one with a probability of at least
    ``coverage``, and below ``coverage + 1 / (m + 1)`` if there are no ties.

    Raises:
        InvalidArgumentError: m is too small for this coverage: the rank exceeds m.
    """
    num_rows = len(scores)
    rank = math.ceil(round((num_rows + 1) * coverage, 9))
    if rank > num_rows:
        needed = math.ceil(round(coverage / (1 - coverage), 9))
        raise InvalidArgumentError(
            f"{path} has {num_rows} rows; a coverage of {coverage} needs at least {needed} to calibrate with"
        )
    width: Array = np.partition(scores, rank - 1, axis=0)[rank - 1]
    return width
