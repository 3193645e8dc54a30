"""The ``detokenize`` transform against transformers' own decode."""

import json

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.backends.postprocess import BACKENDS
from weft.base.errors import InvalidArgumentError, NotFoundError

TEXTS = ["Hello world, it's größe 東京 🙂", "", "the quick brown fox. User: more"]


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer with an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.fixture
def detokenize(version_folder, make_model_context, tokenizer):
    """Makes a loaded transform."""
    tokenizer.save(str(version_folder / "tokenizer.json"))

    def make(inputs=None, outputs=None, **options):
        model = make_model_context(
            inputs or {"output_ids": ("INT64", (-1,))}, outputs or {"TEXT": ("BYTES", (1,))}, **options
        )
        return load_backend(BACKENDS["detokenize"], model)

    return make


def _padded(tokenizer, texts, padding):
    rows = [tokenizer.encode(text).ids for text in texts]
    length = max(map(len, rows)) + 1
    return np.array([row + [padding] * (length - len(row)) for row in rows])


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("padding", [0, -1])
def test_texts_are_those_of_transformers(detokenize, tokenizer, skips, padding):
    """Rows padded with the end token or with -1 give the texts that transformers gives."""
    ids = _padded(tokenizer, TEXTS, padding)
    from transformers import PreTrainedTokenizerFast  # takes a second

    oracle = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    expected = [oracle.decode(row[row >= 0].tolist(), skip_special_tokens=skips) for row in ids]
    (outcome,) = execute_batch(detokenize(skip_special_tokens=str(skips)), make_served_request(output_ids=ids))
    assert [[text.encode()] for text in expected] == outcome.outputs["TEXT"].tolist()
    assert skips == (TEXTS == expected) or padding == -1


def test_text_ends_before_the_first_stop_string(detokenize, tokenizer):
    """Each row ends before the first stop string that it has."""
    backend = detokenize(stop=json.dumps(["User:", "größe", "\n"]))
    (outcome,) = execute_batch(backend, make_served_request(output_ids=_padded(tokenizer, TEXTS, 0)))
    assert [[b"Hello world, it's "], [b""], [b"the quick brown fox. "]] == outcome.outputs["TEXT"].tolist()


def test_model_without_batch_dimension_gives_one_text(detokenize, tokenizer):
    """With max_batch_size 0 input and output have no batch dimension."""
    backend = detokenize({"ids": ("INT32", (-1,))}, max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(ids=np.array(tokenizer.encode("quick").ids, np.int32)))
    assert [b"quick"] == outcome.outputs["TEXT"].tolist()


def test_rows_without_ids_are_empty_texts(detokenize):
    """Rows of length 0, and rows of padding only, are empty texts."""
    outcomes = execute_batch(detokenize(), make_served_request(output_ids=np.zeros((2, 0), np.int64)))
    outcomes += execute_batch(detokenize(), make_served_request(output_ids=np.full((2, 3), -100)))
    assert [[[b""], [b""]]] * 2 == [outcome.outputs["TEXT"].tolist() for outcome in outcomes]


def test_unknown_id_fails_its_own_request(detokenize, tokenizer):
    """An id after the end of the vocabulary is INVALID_ARGUMENT with its row; the batch mate is answered."""
    last = tokenizer.get_vocab_size() - 1
    good, failed = execute_batch(
        detokenize(),
        make_served_request(output_ids=np.array([[last]])),
        make_served_request(output_ids=np.array([[1], [last + 1]])),
    )
    assert isinstance(failed, InvalidArgumentError)
    expected = f"input 'output_ids' row 1: token id {last + 1}; the ids of this tokenizer end at {last}"
    assert expected == failed.message
    assert (1, 1) == good.outputs["TEXT"].shape


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "message"),
    [
        ({"ids": ("FP32", (-1,))}, None, {}, "'ids' must be INT64 or INT32 [any], got FP32 [-1]"),
        (None, {"TEXT": ("BYTES", (2,))}, {}, "'TEXT' must be BYTES [1], got BYTES [2]"),
        (None, {"A": ("BYTES", (1,)), "B": ("BYTES", (1,))}, {}, "must have exactly one output, got 2"),
        (None, None, {"stop": "###"}, "'stop' must be a JSON list of strings that are not empty"),
        (None, None, {"stop": '["a", ""]'}, "'stop' must be a JSON list of strings that are not empty"),
        (None, None, {"stops": "[]"}, "unknown parameter 'stops'; did you mean 'stop'?"),
    ],
)
def test_wrong_configuration_is_a_load_error(detokenize, inputs, outputs, options, message):
    """What the configuration has wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        detokenize(inputs, outputs, **options)
    assert message in error.value.message


def test_tokenizer_must_be_there_and_readable(detokenize, version_folder):
    """A missing tokenizer.json is NOT_FOUND, a broken one INVALID_ARGUMENT with the path."""
    (version_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer.json is not a tokenizer"):
        detokenize()
    (version_folder / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match=r"has no file 'tokenizer.json'"):
        detokenize()
