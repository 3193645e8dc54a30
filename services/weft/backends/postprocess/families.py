"""Families of distributions: vectorised mean, variance, quantiles and entropy."""

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from weft.base.tensors import Array
from weft.serving.backends.loading import require

#: Function of the parameters, float64 ``[n, D]`` each; quantiles are ``[n, D, Q]``, other results ``[n, D]``.
Function = Callable[..., Array]


class Family(NamedTuple):
    """Parameters and functions of a family.

    Attributes:
        inputs: Its parameters, in the order in which the functions take them.
        positive: Parameters that must not be negative.
        functions: Returns the functions by output name, given the quantile levels. Outputs without a closed form are
            absent.
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
    special = require("scipy.special", "postprocess")

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
    special = require("scipy.special", "postprocess")
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
