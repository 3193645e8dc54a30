"""The ``features`` transform against scikit-learn."""

import json

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.preprocess import BACKENDS
from weft.base.errors import InvalidArgumentError

RANDOM = np.random.default_rng(0)
TRAINING = np.abs(RANDOM.normal(size=(200, 3)) * [1, 50, 1e-3] + [0, 300, 1])
ROWS = np.abs(RANDOM.normal(size=(33, 3)) * [3, 90, 1e-2] + [0, 300, 1])
COLORS, SIZES = ["red", "green", "größer 🙂"], ["s", "m", "l", "xl"]


@pytest.fixture
def features(version_folder, make_model_context):
    """Makes a loaded transform from the content of its file."""

    def make(content, *, width=3, numbers=3, categories=0, datatype="FP64", suffix="json", **options):
        if suffix == "npz":
            np.savez(version_folder / "features.npz", **content)
        else:
            listed = {name: np.asarray(array, object).tolist() for name, array in content.items()}
            (version_folder / "features.json").write_text(json.dumps(listed))
        inputs = {"NUMBERS": (datatype, (numbers,))} if numbers else {}
        inputs |= {"CATEGORIES": ("BYTES", (categories,))} if categories else {}
        model = make_model_context(inputs, {"FEATURES": (datatype, (width,))}, **options)
        return load_backend(BACKENDS["features"], model)

    return make


def _fitted():
    """By step, the transformer of scikit-learn and what the file has of it. Only the imputer saw gaps."""
    from sklearn.impute import SimpleImputer  # takes half a second
    from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, RobustScaler, StandardScaler

    impute = SimpleImputer().fit(np.where(RANDOM.random(TRAINING.shape) < 0.2, np.nan, TRAINING))
    standard, robust = StandardScaler().fit(TRAINING), RobustScaler().fit(TRAINING)
    min_max = MinMaxScaler((-1, 2)).fit(TRAINING)
    clip = FunctionTransformer(np.clip, kw_args={"a_min": -0.5, "a_max": 0.9})
    return {
        "impute": (impute, {"impute.statistics": impute.statistics_}),
        "log1p": (FunctionTransformer(np.log1p), {}),
        "standard": (standard, {"standard.mean": standard.mean_, "standard.scale": standard.scale_}),
        "robust": (robust, {"robust.center": robust.center_, "robust.scale": robust.scale_}),
        "min_max": (min_max, {"min_max.scale": min_max.scale_, "min_max.min": min_max.min_}),
        "clip": (clip, {"clip.min": [-0.5] * 3, "clip.max": [0.9] * 3}),
    }


@pytest.mark.parametrize("suffix", ["json", "npz"])
@pytest.mark.parametrize("datatype", ["FP64", "FP32"])
@pytest.mark.parametrize(
    "steps",
    [
        "",
        "impute",
        "log1p",
        "standard",
        "robust",
        "min_max",
        "clip",
        "impute,log1p,standard,clip",
        "robust,clip,min_max",
    ],
)
def test_numbers_are_those_of_scikit_learn(features, steps, datatype, suffix):
    """Every step, and several in any order, give what the fitted transformers give one after another."""
    fitted, content = _fitted(), {}
    rows = ROWS.astype(np.float32 if datatype == "FP32" else np.float64)
    if "impute" in steps:
        rows[3, 1] = rows[4, 0] = np.nan
    expected = rows.astype(np.float64)
    for step in filter(None, steps.split(",")):
        transformer, arrays = fitted[step]
        expected, content = transformer.transform(expected), content | arrays
    backend = features(content, steps=steps, suffix=suffix, datatype=datatype)
    (outcome,) = execute_batch(backend, make_served_request(NUMBERS=rows))
    assert rows.dtype == outcome.outputs["FEATURES"].dtype
    np.testing.assert_allclose(outcome.outputs["FEATURES"], expected.astype(rows.dtype), rtol=1e-12, atol=1e-12)


def _text_rows(*rows):
    return np.array([[value.encode() for value in row] for row in rows], np.object_)


@pytest.mark.parametrize("unknown", ["error", "ignore"])
@pytest.mark.parametrize("suffix", ["json", "npz"])
@pytest.mark.parametrize(("encoding", "width"), [("one_hot", 7), ("ordinal", 2), ("ordinal, one_hot", 5)])
def test_categories_are_those_of_scikit_learn(features, unknown, suffix, encoding, width):
    """One-hot and ordinal columns, known and unknown categories, give what scikit-learn's encoders give."""
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder  # takes half a second

    rows = [("red", "xl"), ("größer 🙂", "s"), ("green", "m"), ("red", "s")]
    rows += [("blue", "l"), ("red", "")] if unknown == "ignore" else []
    known = np.array([(color, size) for color in COLORS for size in SIZES], object)
    parts = []
    for column, kind in enumerate((encoding.split(", ") * 2)[:2]):
        encoder = (
            OneHotEncoder(
                categories=[[COLORS, SIZES][column]],
                sparse_output=False,
                handle_unknown="ignore" if unknown == "ignore" else "error",
            )
            if kind == "one_hot"
            else OrdinalEncoder(
                categories=[[COLORS, SIZES][column]], handle_unknown="use_encoded_value", unknown_value=-1
            )
        )
        encoder.fit(known[:, [column]])
        parts.append(encoder.transform(np.array(rows, object)[:, [column]]))
    options = {"width": width, "encoding": encoding, "unknown": unknown, "suffix": suffix, "datatype": "FP32"}
    backend = features({"categories.0": COLORS, "categories.1": SIZES}, numbers=0, categories=2, **options)
    (outcome,) = execute_batch(backend, make_served_request(CATEGORIES=_text_rows(*rows)))
    np.testing.assert_array_equal(outcome.outputs["FEATURES"], np.hstack(parts))


def test_logarithm_of_some_columns(features):
    """log1p.columns says which columns are taken; the others stay."""
    (outcome,) = execute_batch(features({"log1p.columns": [2, 0]}, steps="log1p"), make_served_request(NUMBERS=ROWS))
    expected = np.column_stack([np.log1p(ROWS[:, 0]), ROWS[:, 1], np.log1p(ROWS[:, 2])])
    np.testing.assert_allclose(outcome.outputs["FEATURES"], expected, rtol=1e-12)


def test_an_npz_file_with_a_pickle_is_a_load_error(version_folder, make_model_context):
    """A pickle would run code."""
    model = make_model_context({"NUMBERS": ("FP32", (3,))}, {"FEATURES": ("FP32", (3,))})
    np.savez(version_folder / "features.npz", steps=np.array([{}], object))
    with pytest.raises(InvalidArgumentError, match=r"features.npz is not an npz file of plain arrays"):
        load_backend(BACKENDS["features"], model)
