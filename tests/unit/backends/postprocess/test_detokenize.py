"""The ``detokenize`` transform against transformers' own decode."""

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.backends.postprocess import BACKENDS

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
