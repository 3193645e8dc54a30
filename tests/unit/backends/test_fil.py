"""The ``fil`` backend against the libraries' own predictions, on 1,000 rows with missing values and categories."""

import pickle
import warnings

import lightgbm
import numpy as np
import pytest
import sklearn.ensemble as forests
import treelite
import xgboost
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends import BACKENDS
from weft.base.errors import InvalidArgumentError, UnsupportedError, WeftError

NUM_ROWS, WIDTH = 1000, 12
#: Of the columns of ``ROWS``: the last is a category.
KINDS = ["q"] * (WIDTH - 1) + ["c"]


def _rows():
    random = np.random.default_rng(7)
    rows = random.normal(size=(NUM_ROWS, WIDTH)).astype(np.float32)
    rows[random.random(rows.shape) < 0.1] = np.nan
    rows[:, -1] = random.integers(0, 12, NUM_ROWS)
    return rows


ROWS = _rows()
FULL = np.nan_to_num(ROWS)
NUMBERS = np.nan_to_num(ROWS[:, 0] * 2 + ROWS[:, 1] ** 2) + ROWS[:, -1] % 3
TARGETS = {
    "number": NUMBERS,
    "count": np.abs(NUMBERS) + 0.1,
    "two": (NUMBERS > 1.5).astype(int),
    "four": np.digitize(NUMBERS, [0.5, 1.5, 3]),
}


@pytest.fixture
def load_fil(make_model_context):
    """Makes a loaded backend of so many columns of input and output."""

    def load(model_type, width=1, columns=WIDTH, file="", **parameters):
        inputs, outputs = {"input__0": ("FP32", (columns,))}, {"output__0": ("FP32", (width,))}
        config = {"default_model_filename": file}
        context = make_model_context(inputs, outputs, config=config, model_type=model_type, **parameters)
        return load_backend(BACKENDS["fil"], context)

    return load


def predicted(backend, rows=ROWS):
    """What the backend answers to two requests of a batch and to one of a single row, which agree."""
    halves = [make_served_request(input__0=part) for part in (rows[:400], rows[400:])]
    found = np.concatenate([outcome.outputs["output__0"] for outcome in execute_batch(backend, *halves)])
    (one,) = execute_batch(backend, make_served_request(input__0=rows[:1]))
    assert np.array_equal(one.outputs["output__0"], found[:1])
    assert np.float32 == found.dtype
    return found


def equal(expected, found):
    """Equal as FP32, to the bit."""
    return np.array_equal(np.asarray(expected, np.float32).reshape(len(found), -1), found)


def boosted(target, **parameters):
    """XGBoost's model with categories, and its own prediction."""
    matrix = xgboost.DMatrix(ROWS, TARGETS[target], feature_types=KINDS, enable_categorical=True)
    trees = xgboost.train({"tree_method": "hist", "nthread": 1, "max_depth": 5} | parameters, matrix, 30)
    return trees, trees.predict(xgboost.DMatrix(ROWS, feature_types=KINDS, enable_categorical=True))


@pytest.mark.parametrize("form", ["xgboost_json", "xgboost_ubj", "xgboost"])
@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("number", {"objective": "reg:squarederror"}),
        ("number", {"booster": "dart", "rate_drop": 0.1}),
        ("count", {"objective": "count:poisson"}),
        ("count", {"objective": "reg:gamma"}),
        ("two", {"objective": "binary:logistic"}),
        ("two", {"objective": "reg:logistic", "base_score": 0.3}),
        ("two", {"objective": "binary:logitraw"}),
        ("two", {"objective": "binary:logistic", "num_parallel_tree": 3, "subsample": 0.6}),
        ("four", {"objective": "multi:softprob", "num_class": 4}),
    ],
)
def test_xgboost_is_exact(version_folder, load_fil, target, parameters, form):
    """Of each objective, from each of its formats."""
    trees, expected = boosted(target, **parameters)
    path = version_folder / ("xgboost.json" if form == "xgboost_json" else "xgboost.ubj")
    trees.save_model(path)
    if form == "xgboost":
        path.rename(path.with_suffix(".model"))
    width = 4 if target == "four" else 1
    assert equal(expected, predicted(load_fil(form, width, predict_proba="true")))


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("number", {"objective": "regression"}),
        ("number", {"objective": "regression", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.7}),
        ("two", {"objective": "binary"}),
        ("two", {"objective": "binary", "sigmoid": 0.7}),
        ("two", {"objective": "binary", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.7}),
        ("two", {"objective": "cross_entropy"}),
        ("four", {"objective": "multiclass", "num_class": 4}),
        ("four", {"objective": "multiclassova", "num_class": 4, "sigmoid": 0.7}),
    ],
)
def test_lightgbm_is_exact(version_folder, load_fil, target, parameters, is_sparse):
    """Of each objective; also where values are missing that were not when it was trained."""
    data = lightgbm.Dataset(ROWS if is_sparse else FULL, TARGETS[target], categorical_feature=[WIDTH - 1])
    trees = lightgbm.train(parameters | {"verbose": -1, "num_threads": 1}, data, 30)
    trees.save_model(version_folder / "model.txt")
    width = 4 if target == "four" else 1
    assert equal(trees.predict(ROWS), predicted(load_fil("lightgbm", width, predict_proba="true")))


@pytest.mark.parametrize("form", ["treelite_checkpoint", "sklearn_pickle"])
@pytest.mark.parametrize(
    ("target", "estimator"),
    [
        ("number", forests.RandomForestRegressor(20)),
        ("two", forests.RandomForestClassifier(20)),
        ("four", forests.ExtraTreesClassifier(20)),
        ("number", forests.GradientBoostingRegressor(n_estimators=20)),
        ("two", forests.GradientBoostingClassifier(n_estimators=20)),
        ("four", forests.GradientBoostingClassifier(n_estimators=20)),
        ("two", forests.HistGradientBoostingClassifier(max_iter=20, categorical_features=[WIDTH - 1])),
        ("four", forests.HistGradientBoostingClassifier(max_iter=20)),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "fit") else None,
)
def test_scikit_learn_is_exact(version_folder, load_fil, monkeypatch, target, estimator, form):
    """From a checkpoint, and from a pickle where that is allowed."""
    rows = ROWS if "Hist" in type(estimator).__name__ else FULL
    estimator.fit(rows, TARGETS[target])
    if form == "sklearn_pickle":
        monkeypatch.setenv("WEFT_ALLOW_PICKLE", "1")
        (version_folder / "model.pkl").write_bytes(pickle.dumps(estimator))
    else:
        treelite.sklearn.import_model(estimator).serialize(version_folder / "checkpoint.tl")
    expected = (getattr(estimator, "predict_proba", None) or estimator.predict)(rows)
    width = expected.shape[1] if expected.ndim == 2 else 1
    assert equal(expected, predicted(load_fil(form, width, predict_proba="true"), rows))


def test_an_isolation_forest_scores_as_scikit_learn(version_folder, load_fil):
    """With the other sign, and but for the last bit."""
    forest = forests.IsolationForest(n_estimators=20).fit(FULL)
    treelite.sklearn.import_model(forest).serialize(version_folder / "checkpoint.tl")
    found = predicted(load_fil("treelite_checkpoint"), FULL)[:, 0]
    np.testing.assert_allclose(found, -forest.score_samples(FULL), rtol=2e-7)


def test_a_classifier_says_its_class(version_folder, load_fil):
    """Of two by a threshold, of more by the greatest; both probabilities of two if that is what the output takes."""
    two, expected = boosted("two", objective="binary:logistic")
    two.save_model(version_folder / "two.json")
    four, probabilities = boosted("four", objective="multi:softmax", num_class=4)
    four.save_model(version_folder / "four.json")
    for parameters, classes in (
        ({"is_classifier": "true"}, expected > 0.5),
        ({"output_class": "true", "threshold": "0.9", "algo": "ALGO_AUTO", "storage_type": "AUTO"}, expected > 0.9),
        ({"threshold": "1/10"}, expected > np.float32(0.1)),
    ):
        assert equal(classes, predicted(load_fil("xgboost_json", file="two.json", **parameters)))
    both = load_fil("xgboost_json", 2, file="two.json", predict_proba="true")
    assert equal(np.stack([1 - expected, expected], axis=1), predicted(both))
    assert equal(expected, predicted(load_fil("xgboost_json", file="two.json", is_classifier="0")))
    assert equal(probabilities, predicted(load_fil("xgboost_json", file="four.json")))


@pytest.mark.parametrize(
    ("model_type", "content", "message"),
    [
        ("xgboost_json", b"{}", "is no model of type 'xgboost_json' that Treelite reads"),
        ("xgboost_json", b"", "is no model of type 'xgboost_json'"),
        ("xgboost_ubj", b"\x00" * 100, "is no model of type 'xgboost_ubj'"),
        ("xgboost", b"binf" + b"\x00" * 7, "is no model of type 'xgboost'"),
        ("lightgbm", b"tree\nversion=v4\n", "is no model of type 'lightgbm'"),
        ("treelite_checkpoint", b"\x04\x00\x00\x00\x08" + b"\x00" * 7, "is no model of type 'treelite_checkpoint'"),
        ("sklearn_pickle", b"\x80\x04N.", "is a pickle, which can run any code"),
        ("catboost", b"", "parameter 'model_type' must be one of xgboost, "),
    ],
)
def test_files_that_are_no_model(version_folder, load_fil, model_type, content, message):
    """The error has path and type; a pickle is not read."""
    (version_folder / "file").write_bytes(content)
    with pytest.raises(WeftError, match=message):
        load_fil(model_type, file="file")


def test_what_would_not_be_exact_is_refused(version_folder, load_fil):
    """Zero as a missing value, and several targets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = lightgbm.Dataset(FULL, NUMBERS)
        trees = lightgbm.train({"objective": "regression", "zero_as_missing": True, "verbose": -1}, data, 5)
    trees.save_model(version_folder / "model.txt")
    with pytest.raises(UnsupportedError, match="zero_as_missing"):
        load_fil("lightgbm")
    data = xgboost.DMatrix(FULL, np.stack([NUMBERS, NUMBERS], axis=1))
    xgboost.train({}, data, 3).save_model(version_folder / "xgboost.json")
    with pytest.raises(UnsupportedError, match="predicts several targets"):
        load_fil("xgboost_json")


def test_a_configuration_that_differs_from_the_file_is_refused(version_folder, load_fil):
    """The message has both shapes; a parameter of the wrong type is named."""
    boosted("four", objective="multi:softprob", num_class=4)[0].save_model(version_folder / "xgboost.json")
    for options, message in (
        ({"columns": 5}, r"'input__0' is FP32 \[-1, 5\] by the configuration .*, but FP32 \[-1, 12\]"),
        ({"width": 3, "predict_proba": "true"}, r"'output__0' is FP32 \[-1, 3\] by the configuration .* \[-1, 4\]"),
        ({"predict_proba": "maybe"}, "parameter 'predict_proba' must be true or false, got 'maybe'"),
        ({"threshold": "high"}, "parameter 'threshold' must be finite numbers"),
        ({"cpu_nthread": "-2"}, "parameter 'cpu_nthread' must be a whole number from -1"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            load_fil("xgboost_json", **options)
