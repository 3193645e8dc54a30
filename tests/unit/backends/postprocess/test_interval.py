"""The ``interval`` transform against numpy and scipy, and its coverage on data that it did not see."""

import json

import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
LEVELS_TEXT = ",".join(map(str, LEVELS))
ENDS = {"LOWER": ("FP32", (2,)), "UPPER": ("FP32", (2,))}
MEAN_VARIANCE = {"MEAN": ("FP64", (2,)), "VARIANCE": ("FP64", (2,))}
PREDICTION = {"PREDICTION": ("FP64", (2,))}
QUANTILES = {"QUANTILES": ("FP64", (2, 5))}


@pytest.fixture
def interval(version_folder, make_model_context):
    """Makes a loaded transform, with a calibration file if there is one."""

    def make(method, inputs, *, calibration=None, suffix="npz", **options):
        if calibration is not None and suffix == "npz":
            np.savez(version_folder / "calibration.npz", **calibration)
        elif calibration is not None:
            content = {name: np.asarray(array).tolist() for name, array in calibration.items()}
            (version_folder / "calibration.json").write_text(json.dumps(content))
        return load_backend(BACKENDS["interval"], make_model_context(inputs, ENDS, method=method, **options))

    return make


def _ends(outcome):
    return outcome.outputs["LOWER"], outcome.outputs["UPPER"]


@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("link", ["identity", "exp", "softplus"])
def test_gaussian_interval_is_that_of_scipy(interval, coverage, link):
    """Mean and variance, or what stands for the variance, give the central interval of scipy's normal distribution."""
    random = np.random.default_rng(0)
    mean, given = random.normal(size=(9, 2)) * 100, random.normal(size=(9, 2)) * 3
    given = np.abs(given) if link == "identity" else given
    variance = {"identity": given, "exp": np.exp(given), "softplus": np.log1p(np.exp(given))}[link]
    backend = interval("gaussian", MEAN_VARIANCE, coverage=str(coverage), link=link)
    (outcome,) = execute_batch(backend, make_served_request(MEAN=mean, VARIANCE=given))
    expected = scipy.stats.norm.interval(coverage, mean, np.sqrt(variance))
    for want, got in zip(expected, _ends(outcome), strict=True):
        assert np.float32 == got.dtype
        np.testing.assert_allclose(want, got, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("coverage", [0.9, 0.5, 0.6])
def test_quantiles_are_interpolated(interval, coverage):
    """Ends at and between the levels are those of numpy's interpolation, whether or not the quantiles cross."""
    quantiles = np.random.default_rng(1).normal(size=(9, 2, 5))
    backend = interval("quantile", QUANTILES, coverage=str(coverage), levels=LEVELS_TEXT)
    (outcome,) = execute_batch(backend, make_served_request(QUANTILES=quantiles))
    for level, got in zip([(1 - coverage) / 2, (1 + coverage) / 2], _ends(outcome), strict=True):
        want = [[np.interp(level, LEVELS, np.sort(target)) for target in row] for row in quantiles]
        np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-6)


def _width(scores, coverage):
    """The conformal quantile in the words of the paper: the smallest score that enough of them do not exceed."""
    needed = (len(scores) + 1) * coverage - 1e-9
    return min(score for score in scores if np.sum(scores <= score) >= needed)


@pytest.mark.parametrize("suffix", ["npz", "json"])
@pytest.mark.parametrize(("num_rows", "coverage"), [(9, 0.9), (19, 0.9), (100, 0.9), (101, 0.5), (3, 0.75), (99, 0.55)])
def test_conformal_width_is_the_score_that_enough_do_not_exceed(interval, num_rows, coverage, suffix):
    """Each target gets the width that its own held-out residuals ask for."""
    random = np.random.default_rng(2)
    target, prediction = random.normal(size=(2, num_rows, 2)) * [1, 50]
    calibration = {"target": target, "prediction": prediction}
    backend = interval("conformal", PREDICTION, calibration=calibration, coverage=str(coverage), suffix=suffix)
    (outcome,) = execute_batch(backend, make_served_request(PREDICTION=np.array([[10.0, -5.0]])))
    width = [_width(np.abs(target - prediction)[:, column], coverage) for column in range(2)]
    lower, upper = _ends(outcome)
    np.testing.assert_allclose(lower, [np.subtract([10, -5], width)], rtol=1e-5)
    np.testing.assert_allclose(upper, [np.add([10, -5], width)], rtol=1e-5)


def test_conformal_width_follows_the_scale(interval):
    """With a SCALE the scores are divided by it, and the width of a row is multiplied with its own."""
    random = np.random.default_rng(3)
    target, prediction = random.normal(size=(2, 50, 2))
    scale = random.uniform(0.5, 2, (50, 2))
    calibration = {"target": target, "prediction": prediction, "scale": scale}
    backend = interval("conformal", PREDICTION | {"SCALE": ("FP64", (2,))}, calibration=calibration, link="exp")
    (outcome,) = execute_batch(
        backend, make_served_request(PREDICTION=np.zeros((1, 2)), SCALE=np.log(np.array([[1.0, 3.0]])))
    )
    scores = np.abs(target - prediction) / scale
    np.testing.assert_allclose(
        _ends(outcome)[1], [[_width(scores[:, 0], 0.9), 3 * _width(scores[:, 1], 0.9)]], rtol=1e-5
    )


def test_conformal_quantiles_grow_or_shrink(interval):
    """Quantiles that hold too much are drawn together, those that hold too little apart; never past their middle."""
    quantiles = np.tile(np.array([[-9.0, -1, 0, 1, 9], [-0.1, -0.05, 0, 0.05, 0.1]]), (99, 1, 1))
    target = np.random.default_rng(4).uniform(-1, 1, (99, 2))
    calibration = {"target": target, "quantiles": quantiles}
    backend = interval("conformal_quantile", QUANTILES, calibration=calibration, levels=LEVELS_TEXT)
    (outcome,) = execute_batch(
        backend, make_served_request(QUANTILES=np.concatenate([quantiles[:1], quantiles[:1] * 0]))
    )
    lower, upper = _ends(outcome)
    widths = [
        _width(np.maximum(low - target[:, column], target[:, column] - high), 0.9)
        for column, (low, high) in enumerate([(-9, 9), (-0.1, 0.1)])
    ]
    assert widths[0] < 0 < widths[1]
    np.testing.assert_allclose(upper[0], [9 + widths[0], 0.1 + widths[1]], rtol=1e-5)
    np.testing.assert_allclose(lower[0], [-9 - widths[0], -0.1 - widths[1]], rtol=1e-5)
    assert (0, 0) == (lower[1, 0], upper[1, 0])


@pytest.mark.parametrize("method", ["conformal", "conformal_quantile"])
def test_coverage_holds_on_new_rows(interval, method):
    """For skewed noise and a poor model, the share of new targets inside is the coverage, up to chance."""
    random = np.random.default_rng(5)
    target, new = random.gamma(1.0, 3.0, (2, 4000, 2))
    quantiles = np.tile(np.array([0.0, 1, 2, 3, 4]), (4000, 2, 1))
    if method == "conformal":
        inputs, data = PREDICTION, {"PREDICTION": np.zeros((4000, 2))}
        calibration = {"target": target, "prediction": np.zeros((4000, 2))}
        options = {}
    else:
        inputs, data = QUANTILES, {"QUANTILES": quantiles}  # type: ignore[assignment]
        calibration, options = {"target": target, "quantiles": quantiles}, {"levels": LEVELS_TEXT}
    backend = interval(method, inputs, calibration=calibration, coverage="0.8", **options)
    (outcome,) = execute_batch(backend, make_served_request(**data))  # type: ignore[arg-type]
    lower, upper = _ends(outcome)
    share = ((lower <= new) & (new <= upper)).mean(axis=0)
    np.testing.assert_allclose(share, 0.8, atol=0.03)
