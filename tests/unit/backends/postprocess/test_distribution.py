"""The ``distribution`` transform against scipy.stats."""

import numpy as np
import pytest
import scipy  # its modules are imported when they are used
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.postprocess import BACKENDS

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
