"""The ``distribution`` transform against scipy.stats."""

import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS
from weft.base.errors import InvalidArgumentError

LEVELS = (0.001, 0.05, 0.5, 0.9, 0.999)
INPUTS = {
    "gaussian": ("MEAN", "VARIANCE"),
    "laplace": ("LOCATION", "SCALE"),
    "student_t": ("LOCATION", "SCALE", "DF"),
    "poisson": ("RATE",),
}
POSITIVE = {"VARIANCE", "SCALE", "DF", "RATE"}


def _scipy(family, values):
    """The frozen distributions of scipy for arrays in the order of the inputs."""
    if family == "gaussian":
        return scipy.stats.norm(values[0], np.sqrt(values[1]))
    if family == "laplace":
        return scipy.stats.laplace(values[0], values[1])
    if family == "student_t":
        return scipy.stats.t(values[2], values[0], values[1])
    return scipy.stats.poisson(values[0])


@pytest.fixture
def distribution(make_model_context):
    """Makes a loaded transform of two targets."""

    def make(family, outputs=None, *, inputs=None, **options):
        declared = inputs or dict.fromkeys(INPUTS[family], ("FP64", (2,)))
        levels = options.setdefault("levels", ",".join(map(str, LEVELS)))
        num_levels = len(levels.split(","))
        known = {"MEAN": ("FP32", (2,)), "VARIANCE": ("FP32", (2,)), "QUANTILES": ("FP32", (2, num_levels))}
        known |= {} if family == "poisson" else {"ENTROPY": ("FP32", (2,))}
        model = make_model_context(declared, known if outputs is None else outputs, family=family, **options)
        return load_backend(BACKENDS["distribution"], model)

    return make


def _values(family, num_rows):
    random = np.random.default_rng(0)
    ranges = {"DF": (0.3, 40), "SCALE": (0.01, 30), "VARIANCE": (0.01, 30), "RATE": (0, 200)}
    return [
        random.uniform(*ranges[name], (num_rows, 2)) if name in POSITIVE else random.normal(size=(num_rows, 2)) * 20
        for name in INPUTS[family]
    ]


@pytest.mark.parametrize("family", list(INPUTS))
def test_outputs_are_those_of_scipy(distribution, family):
    """Mean, variance, quantiles and entropy of many distributions equal scipy's, where they exist and where not."""
    values = _values(family, 40)
    if family == "student_t":
        values[2][:4] = [[0.5, 1.0], [1.5, 2.0], [2.5, 30], [1e6, 3]]
    if family == "poisson":
        values[0][:2] = [[0.0, 1e-9], [1.0, 5000.0]]
    (outcome,) = execute_batch(
        distribution(family), make_served_request(**dict(zip(INPUTS[family], values, strict=True)))
    )
    outputs, oracle = outcome.outputs, _scipy(family, values)
    assert {np.dtype(np.float32)} == {array.dtype for array in outputs.values()}
    mean = np.where(values[2] > 1, oracle.mean(), np.nan) if family == "student_t" else oracle.mean()
    np.testing.assert_allclose(outputs["MEAN"], mean, rtol=1e-6)
    np.testing.assert_allclose(outputs["VARIANCE"], oracle.var(), rtol=1e-5)
    for column, level in enumerate(LEVELS):
        np.testing.assert_allclose(outputs["QUANTILES"][:, :, column], oracle.ppf(level), rtol=1e-5, atol=1e-5)
    if family != "poisson":
        np.testing.assert_allclose(outputs["ENTROPY"], oracle.entropy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("link", ["exp", "softplus"])
@pytest.mark.parametrize("family", list(INPUTS))
def test_positive_parameters_may_come_as_the_network_gives_them(distribution, family, link):
    """With a link the outputs are those of the numbers that it stands for."""
    values = [
        np.abs(array) + 0.5 if name in POSITIVE else array
        for name, array in zip(INPUTS[family], _values(family, 5), strict=True)
    ]
    inverse = {"exp": np.log, "softplus": lambda x: np.log(np.expm1(np.minimum(x, 30))) + np.maximum(x - 30, 0)}[link]
    raw = [inverse(array) if name in POSITIVE else array for name, array in zip(INPUTS[family], values, strict=True)]  # type: ignore[operator]
    plain, linked = (
        execute_batch(
            distribution(family, link=name), make_served_request(**dict(zip(INPUTS[family], arrays, strict=True)))
        )[0]
        for name, arrays in (("identity", values), (link, raw))
    )
    for name, array in plain.outputs.items():
        np.testing.assert_allclose(array, linked.outputs[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rate", "k"), [(0.5, 0), (1.097, 2), (30.0, 25)])
def test_poisson_quantile_at_a_step(distribution, rate, k):
    """The quantile at just the probability of at most k is k, not k + 1."""
    level = scipy.stats.poisson.cdf(k, rate)
    backend = distribution("poisson", {"QUANTILES": ("FP32", (2, 1))}, levels=repr(float(level)))
    (outcome,) = execute_batch(backend, make_served_request(RATE=np.full((1, 2), rate)))
    assert [[[k], [k]]] == outcome.outputs["QUANTILES"].tolist()


def test_only_declared_outputs_are_given(distribution):
    """Of the outputs, those that are declared are computed; with max_batch_size 0 without a batch dimension."""
    backend = distribution("gaussian", {"QUANTILES": ("FP32", (2, 1))}, levels="0.5", max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(MEAN=np.array([1.0, 2.0]), VARIANCE=np.ones(2)))
    assert {"QUANTILES": [[1], [2]]} == {name: array.tolist() for name, array in outcome.outputs.items()}


def test_no_spread_is_certain(distribution):
    """A variance of 0 is allowed: every quantile is the mean, the entropy minus infinity."""
    (outcome,) = execute_batch(
        distribution("gaussian"), make_served_request(MEAN=np.array([[3.0, 4.0]]), VARIANCE=np.zeros((1, 2)))
    )
    assert [[[3.0] * 5, [4.0] * 5]] == outcome.outputs["QUANTILES"].tolist()
    assert [[-np.inf, -np.inf]] == outcome.outputs["ENTROPY"].tolist()


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("gaussian", "MEAN", np.nan, "input 'MEAN' row 1: nan at [0]; numbers must be finite"),
        ("laplace", "SCALE", -0.5, "input 'SCALE' row 1: -0.5 at [0]; it must be finite, at least 0"),
        ("student_t", "DF", 0.0, "input 'DF' row 1: 0.0 at [0]; it must be above 0"),
        ("poisson", "RATE", np.inf, "input 'RATE' row 1: inf at [0]; numbers must be finite"),
    ],
)
def test_bad_parameters_fail_their_own_request(distribution, family, key, value, message):
    """What is no parameter of the family is INVALID_ARGUMENT with its place; the batch mate is answered."""
    good_values = dict(zip(INPUTS[family], _values(family, 2), strict=True))
    bad_values = {name: array.copy() for name, array in good_values.items()}
    bad_values[key][1, 0] = value
    good, failed = execute_batch(
        distribution(family), make_served_request(**good_values), make_served_request(**bad_values)
    )
    assert isinstance(failed, InvalidArgumentError)
    assert message == failed.message
    assert (2, 2) == good.outputs["MEAN"].shape


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "cauchy",
            {"inputs": {"X": ("FP32", (1,))}},
            "must be one of gaussian, laplace, student_t, poisson, got 'cauchy'",
        ),
        (
            "gaussian",
            {"inputs": {"MEAN": ("FP32", (2,))}},
            "family 'gaussian' must have the inputs MEAN, VARIANCE, got MEAN",
        ),
        ("gaussian", {"levels": "0.5,0.1"}, "'levels' must be ascending numbers between 0 and 1, got '0.5,0.1'"),
        ("gaussian", {"levels": "0,0.1"}, "'levels' must be ascending numbers between 0 and 1"),
        ("poisson", {"outputs": {"ENTROPY": ("FP32", (2,))}}, "unknown output 'ENTROPY'; use some of MEAN, VARIANCE"),
        ("gaussian", {"outputs": {"MEAN": ("FP32", (3,))}}, "'MEAN' must be FP32 [2], got FP32 [3]"),
        ("gaussian", {"quantiles": "0.5"}, "unknown parameter 'quantiles'"),
    ],
)
def test_wrong_configuration_is_a_load_error(distribution, family, options, message):
    """What the configuration has wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        distribution(family, **options)
    assert message in error.value.message
