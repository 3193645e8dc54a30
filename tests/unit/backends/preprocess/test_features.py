"""The ``features`` transform against scikit-learn."""

import json

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.preprocess import BACKENDS
from weft.base.errors import InvalidArgumentError, NotFoundError

RANDOM = np.random.default_rng(0)
TRAINING = np.abs(RANDOM.normal(size=(200, 3)) * [1, 50, 1e-3] + [0, 300, 1])
ROWS = np.abs(RANDOM.normal(size=(33, 3)) * [3, 90, 1e-2] + [0, 300, 1])
COLORS, SIZES = ["red", "green", "größer 🙂"], ["s", "m", "l", "xl"]


@pytest.fixture
def features(version_folder, make_model_context):
    """Makes a loaded transform from the content of its file."""

    def make(content, *, width=3, numbers=3, categories=0, datatype="FP64", suffix="json", kind="BYTES", **options):
        if suffix == "npz":
            np.savez(version_folder / "features.npz", **content)
        else:
            listed = {name: np.asarray(array, object).tolist() for name, array in content.items()}
            (version_folder / "features.json").write_text(json.dumps(listed))
        inputs = {"NUMBERS": (datatype, (numbers,))} if numbers else {}
        inputs |= {"CATEGORIES": (kind, (categories,))} if categories else {}
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


def _text_content(**more):
    return {"categories.0": COLORS, "categories.1": SIZES, **more}


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
    backend = features(
        _text_content(), numbers=0, categories=2, width=width, encoding=encoding, unknown=unknown, suffix=suffix,
        datatype="FP32",
    )  # fmt: skip
    (outcome,) = execute_batch(backend, make_served_request(CATEGORIES=_text_rows(*rows)))
    np.testing.assert_array_equal(outcome.outputs["FEATURES"], np.hstack(parts))


def test_whole_numbers_may_be_categories(features):
    """A column of INT64 is encoded by the numbers in the file."""
    backend = features({"categories.0": [3, -1, 7]}, numbers=0, categories=1, width=3, kind="INT64")
    (outcome,) = execute_batch(backend, make_served_request(CATEGORIES=np.array([[7], [3]])))
    assert [[0, 0, 1], [1, 0, 0]] == outcome.outputs["FEATURES"].tolist()


def test_numbers_come_before_categories(features):
    """The vector of a row with both is its scaled numbers, then its categories."""
    content = _text_content() | {"standard.mean": [1.0, 2.0, 3.0]}
    backend = features(content, categories=2, width=5, encoding="ordinal", steps="standard")
    inputs = {"NUMBERS": np.array([[2.0, 4.0, 6.0]]), "CATEGORIES": _text_rows(("green", "xl"))}
    (outcome,) = execute_batch(backend, make_served_request(**inputs))
    assert [[1, 2, 3, 1, 3]] == outcome.outputs["FEATURES"].tolist()


def test_missing_category_has_a_replacement(features):
    """An empty string stands for the category that the file names."""
    content = _text_content(**{"categories.missing": ["green", "nothing"]})
    backend = features(content, numbers=0, categories=2, width=2, encoding="ordinal", unknown="ignore")
    (outcome,) = execute_batch(backend, make_served_request(CATEGORIES=_text_rows(("", ""))))
    assert [[1, -1]] == outcome.outputs["FEATURES"].tolist()


def test_logarithm_of_some_columns(features):
    """log1p.columns says which columns are taken; the others stay."""
    (outcome,) = execute_batch(features({"log1p.columns": [2, 0]}, steps="log1p"), make_served_request(NUMBERS=ROWS))
    expected = np.column_stack([np.log1p(ROWS[:, 0]), ROWS[:, 1], np.log1p(ROWS[:, 2])])
    np.testing.assert_allclose(outcome.outputs["FEATURES"], expected, rtol=1e-12)


def test_error_shows_the_number_that_came(features):
    """The error has the number of the request, not what a step made of it."""
    backend = features({"log1p.columns": [2]}, steps="log1p")
    (outcome,) = execute_batch(backend, make_served_request(NUMBERS=np.array([[1.0, 2.0, -1.0]])))
    assert "input 'NUMBERS' row 0: -1.0 at [2] has no finite result" in outcome.message


def test_bound_may_be_absent(features):
    """A bound that is null in the file is none."""
    content = {"clip.min": [None, 0.0, None], "clip.max": [1.0, None, None]}
    (outcome,) = execute_batch(
        features(content, steps="clip"), make_served_request(NUMBERS=np.array([[9.0, -9.0, 99.0], [-9.0, 9.0, -99.0]]))
    )
    assert [[1, 0, 99], [-9, 9, -99]] == outcome.outputs["FEATURES"].tolist()


def test_missing_numbers_may_be_kept(features):
    """With missing keep NaN passes every step, beside numbers that are scaled."""
    backend = features({"standard.mean": [1.0] * 3}, steps="standard", missing="keep")
    (outcome,) = execute_batch(backend, make_served_request(NUMBERS=np.array([[np.nan, 2.0, 3.0]])))
    np.testing.assert_array_equal(outcome.outputs["FEATURES"], [[np.nan, 1, 2]])


def test_model_without_batch_dimension_gives_one_row(features):
    """With max_batch_size 0 input and output have no batch dimension."""
    backend = features({"standard.mean": [1.0] * 3}, steps="standard", max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(NUMBERS=np.array([1.0, 2.0, 3.0])))
    assert [0, 1, 2] == outcome.outputs["FEATURES"].tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "row 1: nan at [2] has no finite result; a missing number needs the step impute, or missing: keep"),
        (np.inf, "row 1: inf at [2] must be finite"),
        (-1.0, "row 1: -1.0 at [2] has no finite result"),
        (-2.0, "row 1: -2.0 at [2] has no finite result"),
    ],
)
def test_bad_number_fails_its_own_request(features, value, message):
    """NaN, infinity and what has no logarithm are INVALID_ARGUMENT with their place; the batch mates are answered."""
    bad = ROWS[:2].copy()
    bad[1, 2] = value
    first, failed, last = execute_batch(
        features({}, steps="log1p"), *(make_served_request(NUMBERS=rows) for rows in (ROWS[:1], bad, ROWS[:3]))
    )
    assert isinstance(failed, InvalidArgumentError)
    assert failed.message.startswith(f"input 'NUMBERS' {message}")
    np.testing.assert_allclose(first.outputs["FEATURES"], np.log1p(ROWS[:1]))
    np.testing.assert_allclose(last.outputs["FEATURES"], np.log1p(ROWS[:3]))


def test_unknown_category_fails_its_own_request(features):
    """A value that is no category is INVALID_ARGUMENT with its place and what is allowed."""
    backend = features(_text_content(), numbers=0, categories=2, width=7)
    good, failed = execute_batch(
        backend,
        make_served_request(CATEGORIES=_text_rows(("red", "s"))),
        make_served_request(CATEGORIES=_text_rows(("red", "s"), ("red", "huge"))),
    )
    expected = "input 'CATEGORIES' row 1 column 1: unknown category 'huge'; it must be one of 's', 'm', 'l', 'xl'"
    assert expected == failed.message
    assert (1, 7) == good.outputs["FEATURES"].shape


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({}, {"steps": "scale"}, "'steps' must be some of impute, log1p, standard, robust, min_max, clip"),
        ({}, {"steps": "clip,clip"}, "each at most once, got 'clip,clip'"),
        ({}, {"steps": "impute"}, "features.json has no 'impute.statistics'; it has nothing"),
        ({}, {"steps": "standard"}, "has neither 'standard.mean' nor 'standard.scale'; step standard needs one"),
        (
            {"standard.mean": [1, 2]},
            {"steps": "standard"},
            "'standard.mean' must be numbers of shape [3], got shape [2]",
        ),
        ({"standard.mean": [1, 2, None]}, {"steps": "standard"}, "'standard.mean' must be finite numbers, got nan"),
        ({"standard.mean": "abc"}, {"steps": "standard"}, "'standard.mean' must be numbers, got something else"),
        ({"standard.scale": [1, 0, 1]}, {"steps": "standard"}, "must be other than 0, got 0 in column 1"),
        ({"clip.min": [1, 1, 1], "clip.max": [1, 1, 0]}, {"steps": "clip"}, "got 1.0 and 0.0 in column 2"),
        ({"log1p.columns": [0, 3]}, {"steps": "log1p"}, "must be different whole numbers from 0 to 2, got [0.0, 3.0]"),
        ({"standard.mean": [1, 2, 3]}, {}, "unknown 'standard.mean'"),
        ({"standard.mean": [1] * 3, "standard.var": [1] * 3}, {"steps": "standard"}, "unknown 'standard.var'"),
        ({}, {"step": "clip"}, "unknown parameter 'step'; did you mean 'steps'?"),
        ({}, {"missing": "drop"}, "'missing' must be one of error, keep, got 'drop'"),
        ({}, {"width": 4}, "'FEATURES' must be FP32 or FP64 [3], got FP64 [4]"),
        ({}, {"numbers": -1}, "'NUMBERS' must have a fixed number of columns, got -1"),
        ({"categories.0": ["a"]}, {"categories": 2, "numbers": 0}, "has no 'categories.1'; it has categories.0"),
        ({"categories.0": ["a", "a"]}, {"categories": 1, "numbers": 0}, "'categories.0' has a category twice"),
        ({"categories.0": []}, {"categories": 1, "numbers": 0}, "must be a list of at least one string, got []"),
        ({"categories.0": [1, 2]}, {"categories": 1, "numbers": 0}, "must be a list of at least one string"),
        ({"categories.0": [1.5]}, {"categories": 1, "kind": "INT64"}, "must be whole numbers, got [1.5]"),
        (
            {"categories.0": ["a"]},
            {"categories": 1, "encoding": "hash"},
            "'encoding' must be 1 or 1 of one_hot, ordinal",
        ),
        (
            {"categories.0": ["a"], "categories.missing": ["a", "b"]},
            {"categories": 1, "numbers": 0},
            "'categories.missing' must have 1 strings, one per column, got 2",
        ),
        ({"categories.0": ["a"]}, {"categories": 1, "numbers": 0, "steps": "clip"}, "left out where there is no input"),
    ],
)
def test_wrong_configuration_is_a_load_error(features, content, options, message):
    """What configuration or file have wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        features(content, **options)
    assert message in error.value.message


def test_file_must_be_there_and_readable(version_folder, make_model_context):
    """No file, two files, no JSON, no npz, and an npz with a pickle are load errors that name the file."""
    model = make_model_context({"NUMBERS": ("FP32", (3,))}, {"FEATURES": ("FP32", (3,))})
    with pytest.raises(NotFoundError, match=r"has no file 'features.json' or 'features.npz'"):
        load_backend(BACKENDS["features"], model)
    (version_folder / "features.json").write_text("[1]")
    with pytest.raises(InvalidArgumentError, match=r"features.json must hold an object, got list"):
        load_backend(BACKENDS["features"], model)
    (version_folder / "features.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"features.json is not JSON"):
        load_backend(BACKENDS["features"], model)
    (version_folder / "features.npz").write_bytes(b"PK")
    with pytest.raises(InvalidArgumentError, match=r"has both features.json and features.npz"):
        load_backend(BACKENDS["features"], model)
    (version_folder / "features.json").unlink()
    with pytest.raises(InvalidArgumentError, match=r"features.npz is not an npz file of plain arrays"):
        load_backend(BACKENDS["features"], model)
    np.savez(version_folder / "features.npz", steps=np.array([{}], object))
    with pytest.raises(InvalidArgumentError, match=r"features.npz is not an npz file of plain arrays"):
        load_backend(BACKENDS["features"], model)
