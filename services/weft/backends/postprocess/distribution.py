"""``distribution``: mean, variance, quantiles and entropy of a distribution whose parameters a model predicts."""

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from weft.backends.contract import inputs_among
from weft.base.tensors import Array
from weft.serving.backends.base import RowBackend, check_finite, check_rows, first_bad
from weft.serving.backends.loading import check_tensor, outputs_among, require
from weft.serving.backends.parameters import ParameterReader

#: Link functions: network outputs to positive parameters.
LINKS: Mapping[str, Callable[[Array], Array]] = {
    "identity": lambda values: values,
    "exp": np.exp,
    "softplus": lambda values: np.logaddexp(values, 0),
}


def positive(array: Array, name: str, link: str) -> Array:
    """Apply ``link`` to ``[num_rows, ...]``. Raises InvalidArgumentError if a result is not finite or below 0."""
    check_finite(array, name)
    with np.errstate(over="ignore"):
        values = LINKS[link](array)
    is_good = (values >= 0) & np.isfinite(values)
    if not is_good.all():
        after = "" if link == "identity" else f" after {link}"
        check_rows(
            is_good, name, lambda row: f"{first_bad(values[row], is_good[row])}{after}; it must be finite, at least 0"
        )
    return values


#: Function of the parameters, float64 ``[n, D]`` each; quantiles are ``[n, D, Q]``, other results ``[n, D]``.
Function = Callable[..., Array]
_FLOATS = ("FP32", "FP64")


class Family(NamedTuple):
    """Parameters of a family, those that must not be negative, and its functions.

    ``functions`` returns these by output name, given the quantile levels; they take the parameters in this order.
    Outputs without a closed form are absent.
    """

    inputs: tuple[str, ...]
    positive: tuple[str, ...]
    functions: Callable[[Sequence[float]], Mapping[str, Function]]


def _gaussian(levels: Sequence[float]) -> Mapping[str, Function]:
    z = np.array([NormalDist().inv_cdf(level) for level in levels])
    return {
        "MEAN": lambda mean, _: mean,
        "VARIANCE": lambda _, variance: variance,
        "QUANTILES": lambda mean, variance: mean[..., None] + np.sqrt(variance)[..., None] * z,
        "ENTROPY": lambda _, variance: np.log(2 * np.pi * np.e * variance) / 2,
    }


def _laplace(levels: Sequence[float]) -> Mapping[str, Function]:
    p = np.array(levels)
    tails = np.where(p < 0.5, np.log(2 * p), -np.log(2 * (1 - p)))
    return {
        "MEAN": lambda location, _: location,
        "VARIANCE": lambda _, scale: 2 * scale**2,
        "QUANTILES": lambda location, scale: location[..., None] + scale[..., None] * tails,
        "ENTROPY": lambda _, scale: 1 + np.log(2 * scale),
    }


def _student_t(levels: Sequence[float]) -> Mapping[str, Function]:
    special = require("scipy.special", "transforms")

    def variance(_: Array, scale: Array, df: Array) -> Array:
        finite = scale**2 * df / np.where(df > 2, df - 2, 1)
        return np.where(df > 2, finite, np.where(df > 1, np.inf, np.nan))

    def quantiles(location: Array, scale: Array, df: Array) -> Array:
        values: Array = location[..., None] + scale[..., None] * special.stdtrit(df[..., None], np.array(levels))
        return values

    def entropy(_: Array, scale: Array, df: Array) -> Array:
        half = (df + 1) / 2
        of_t: Array = half * (special.digamma(half) - special.digamma(df / 2)) + special.betaln(df / 2, 0.5)
        return of_t + np.log(df) / 2 + np.log(scale)

    return {
        "MEAN": lambda location, _, df: np.where(df > 1, location, np.nan),
        "VARIANCE": variance,
        "QUANTILES": quantiles,
        "ENTROPY": entropy,
    }


def _poisson(levels: Sequence[float]) -> Mapping[str, Function]:
    special = require("scipy.special", "transforms")
    p = np.array(levels)

    def quantiles(rate: Array) -> Array:
        rate = rate[..., None]
        above = np.ceil(special.pdtrik(p, rate))  # inverse of the continuous extension, up to one too large
        below = np.maximum(above - 1, 0)
        values: Array = np.where(special.pdtr(below, rate) >= p, below, above)
        return values

    return {"MEAN": lambda rate: rate, "VARIANCE": lambda rate: rate, "QUANTILES": quantiles}


FAMILIES: Mapping[str, Family] = {
    "gaussian": Family(("MEAN", "VARIANCE"), ("VARIANCE",), _gaussian),
    "laplace": Family(("LOCATION", "SCALE"), ("SCALE",), _laplace),
    "student_t": Family(("LOCATION", "SCALE", "DF"), ("SCALE", "DF"), _student_t),
    "poisson": Family(("RATE",), ("RATE",), _poisson),
}


class DistributionBackend(RowBackend):
    """Computes statistics of the distribution whose parameters a model outputs.

    ::

        family       inputs, FP32 or FP64 [n, D]    MEAN        VARIANCE               ENTROPY in nats
        gaussian     MEAN, VARIANCE                 mean        variance               ln(2 pi e variance) / 2
        laplace      LOCATION, SCALE                location    2 scale**2             1 + ln(2 scale)
        student_t    LOCATION, SCALE, DF            location    scale**2 df / (df-2)   see the source
        poisson      RATE                           rate        rate                   -

        MEAN, VARIANCE, ENTROPY FP32 [n, D], QUANTILES FP32 [n, D, Q]

    Only declared outputs are computed. A quantile at level p is the smallest x with P(X <= x) >= p.
    For ``student_t`` the mean is NaN for df up to 1, the variance NaN for df up to 1 and infinite for df up to 2. The
    entropy of a Poisson distribution has no closed form and is not offered; that of classes is an output of backend
    ``softmax``.

    Parameters (``family`` required):
        family: ``gaussian``, ``laplace``, ``student_t`` or ``poisson``.
        levels: Levels of the quantiles, between 0 and 1, ascending, comma-separated. Default 0.05,0.5,0.95.
        link: Function that maps the inputs VARIANCE, SCALE, DF and RATE to values: ``identity``, ``exp`` or
            ``softplus``. Default identity.

    Numbers that are not finite, and a variance, scale, df or rate below 0 (df: also 0), are INVALID_ARGUMENT for their
    own request alone.

    Source:
        ``scipy.stats``: norm, laplace, t and poisson, the oracles of the tests.
    """

    def load(self) -> None:
        """Read the parameters and validate them against the declared tensors."""
        parameters = ParameterReader(self.model)
        family = parameters.choice("family", "", tuple(FAMILIES))
        levels = parameters.numbers("levels", (0.05, 0.5, 0.95))
        self._link = parameters.choice("link", "identity", tuple(LINKS))
        parameters.finish()
        if list(levels) != sorted(set(levels)) or not 0 < levels[0] <= levels[-1] < 1:
            raise parameters.fault("levels", ",".join(map(str, levels)), "ascending numbers between 0 and 1")
        self._family = FAMILIES[family]
        inputs = inputs_among(self.model, f"family '{family}'", self._family.inputs)
        first, *others = (inputs[name] for name in self._family.inputs)
        dims = check_tensor(self.model, first, _FLOATS, (None,)).dims
        for spec in others:
            check_tensor(self.model, spec, _FLOATS, dims)
        functions = self._family.functions(levels)
        outputs = outputs_among(
            self.model,
            {name: (("FP32",), (*dims, len(levels)) if name == "QUANTILES" else dims) for name in functions},
        )
        self._functions = {name: functions[name] for name in outputs}

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Compute the declared outputs in float64."""
        parameters = [self._checked(name, inputs[name].astype(np.float64)) for name in self._family.inputs]
        with np.errstate(divide="ignore", over="ignore"):  # zero variance has an entropy of minus infinity
            return {name: function(*parameters).astype(np.float32) for name, function in self._functions.items()}

    def _checked(self, name: str, array: Array) -> Array:
        if name not in self._family.positive:
            check_finite(array, name)
            return array
        values = positive(array, name, self._link)
        if name == "DF":
            is_good = values > 0
            check_rows(is_good, name, lambda row: f"{first_bad(values[row], is_good[row])}; it must be above 0")
        return values
