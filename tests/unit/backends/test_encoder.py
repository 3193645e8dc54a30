"""The backend ``encoder``: what a model loads from, and what becomes of the requests of a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.encoders import changed_config, save_encoder, save_tokenizer, write_json
from tests.unit.builders import MakeModelContext, execute_batch, load_backend, make_served_request

from weft.backends.encoder import EncoderBackend
from weft.base.errors import InvalidArgumentError, NotFoundError, WeftError

INPUTS = {"text": ("BYTES", (1,)), "input_ids": ("INT32", (-1,)), "truncate_prompt_tokens": ("INT32", (1,))}
PAIRS = {"text": ("BYTES", (1,)), "text_pair": ("BYTES", (1,))}
OUTPUTS = {"embedding": ("FP32", (64,)), "num_tokens": ("INT32", (1,))}


def message(outcome: Any) -> str:
    assert isinstance(outcome, InvalidArgumentError)
    return outcome.message


def embedding(outcome: Any) -> Any:
    assert not isinstance(outcome, WeftError), outcome
    return outcome.outputs["embedding"]


@pytest.fixture
def bert(version_folder: Path) -> Path:
    """The version folder with a BERT and its tokenizer."""
    save_encoder(version_folder, "BertModel")
    save_tokenizer(version_folder)
    return version_folder


def test_bad_requests_fail_alone(bert: Path, make_model_context: MakeModelContext) -> None:
    """Each with its row; the others of the batch are as without them."""
    model = load_backend(EncoderBackend, make_model_context(INPUTS, OUTPUTS, max_text_bytes="2000"))
    ids = np.array([[2, 4, 3]], np.int32)
    good = [make_served_request(text=[b"w0"]), make_served_request(input_ids=ids), make_served_request(text=[b""])]
    bad = [
        make_served_request(text=[b"w1", b"\xff"]),
        make_served_request(text=[b"x" * 2001]),
        make_served_request(text=[b"w1 " * 299]),
        make_served_request(text=[b"w1"], input_ids=ids),
        make_served_request(truncate_prompt_tokens=np.array([[5]], np.int32)),
        make_served_request(input_ids=np.array([[4, -1]], np.int32)),
        make_served_request(input_ids=np.zeros((1, 0), np.int32)),
        make_served_request(text=[b"w1", b"w2"], truncate_prompt_tokens=np.array([[5], [1]], np.int32)),
    ]
    first, *refused, second, third = execute_batch(model, good[0], *bad, *good[1:])
    words = [
        "input 'text' row 1 is not UTF-8",
        "row 0 has 2001 bytes; at most 2000",
        "input 'text' row 0 has 301 tokens; 1 to 300 are allowed: send less, or let 'truncate_prompt_tokens' cut texts",
        "send one of the inputs 'text' and 'input_ids'",
        "send one of the inputs",
        "input 'input_ids' row 0: token ids must be from 0 to 123, got -1 to 4",
        "input 'input_ids' row 0 has 0 tokens",
        "input 'truncate_prompt_tokens' row 1 must be -1, or from 3 to 300, got 1",
    ]
    for outcome, text in zip(refused, words, strict=True):
        assert text in message(outcome)
    np.testing.assert_allclose(embedding(first), embedding(second), atol=2e-6)
    assert [[3], [2]] == [second.outputs["num_tokens"][0].tolist(), third.outputs["num_tokens"][0].tolist()]
    assert all(isinstance(outcome, InvalidArgumentError) for outcome in execute_batch(model, *bad))


def test_what_nobody_waits_for_is_not_computed(bert: Path, make_model_context: MakeModelContext) -> None:
    """Rows of a cancelled request are left out, and the others are as ever."""
    model = load_backend(EncoderBackend, make_model_context(INPUTS, OUTPUTS))
    left, kept = make_served_request(text=[b"w1", b"w2"]), make_served_request(text=[b"w3"])
    left.cancel()
    (empty, found), (alone,) = execute_batch(model, left, kept), execute_batch(model, kept)
    assert not embedding(empty).any()
    np.testing.assert_allclose(embedding(found), embedding(alone), atol=2e-6)


def test_a_model_without_a_tokenizer_takes_token_ids(
    version_folder: Path, make_model_context: MakeModelContext
) -> None:
    """And no text; one of pairs does not load."""
    save_encoder(version_folder, "BertModel")
    model = load_backend(EncoderBackend, make_model_context(INPUTS, OUTPUTS))
    ids = make_served_request(input_ids=np.array([[2, 4, 3]], np.int32))
    found, refused = execute_batch(model, ids, make_served_request(text=[b"w0"]))
    assert embedding(found).shape == (1, 64)
    assert "has no tokenizer.json; send token ids as 'input_ids', or add the file" in message(refused)
    save_encoder(version_folder, "BertForSequenceClassification")
    with pytest.raises(NotFoundError, match=r"has no file 'tokenizer\.json'"):
        load_backend(EncoderBackend, make_model_context(PAIRS, {"scores": ("FP32", (2,))}))


def test_settings_of_the_folder_and_of_the_model(bert: Path, make_model_context: MakeModelContext) -> None:
    """The default prompt and lower case; longer texts are cut if the model says so; no batch dimension."""
    plain = load_backend(EncoderBackend, make_model_context(INPUTS, OUTPUTS, pooling="lasttoken", normalize="false"))
    texts = [b"w7 w8 w0", b" ".join([b"w1"] * 18)]
    wanted, cut = embedding(execute_batch(plain, make_served_request(text=texts))[0])
    assert abs(np.linalg.norm(wanted) - 1) > 0.1
    said = {"prompts": {"a": "W7 w8 "}, "default_prompt_name": "a"}
    write_json(bert / "config_sentence_transformers.json", said)
    write_json(bert / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})
    options: dict[str, Any] = {"pooling": "lasttoken", "normalize": "false", "truncate": "true"}
    model = load_backend(EncoderBackend, make_model_context(INPUTS, OUTPUTS, max_batch_size=0, **options))
    (found,) = execute_batch(model, make_served_request(text=np.array([b"W0"], np.object_)))
    np.testing.assert_allclose(embedding(found), wanted, atol=2e-6)
    (found,) = execute_batch(model, make_served_request(text=np.array([b"w1 " * 99], np.object_)))
    assert [20] == found.outputs["num_tokens"].tolist()
    assert embedding(found).shape == cut.shape


@pytest.mark.parametrize(("inputs", "outputs", "parameters", "words"), [
    (INPUTS, OUTPUTS, {"poling": "cls"}, "unknown parameter 'poling'; did you mean 'pooling'"),
    (INPUTS, OUTPUTS, {"pooling": "first"}, "'pooling' must be one of mean, cls, max, lasttoken, got 'first'"),
    (INPUTS, OUTPUTS, {"dtype": "int8"}, "'dtype' must be one of auto, float32"),
    (PAIRS, OUTPUTS, {}, "an encoder must have the inputs text and may have"),
    ({"text": ("BYTES", (2,))}, OUTPUTS, {}, "'text' must be BYTES [1], got BYTES [2]"),
    (INPUTS, {"embedding": ("FP32", (65,))}, {}, "'embedding' must be FP32 [64], got FP32 [65]"),
    (INPUTS, {"scores": ("FP32", (1,))}, {}, "unknown output 'scores'; use some of embedding, num_tokens"),
])  # fmt: skip
def test_configurations_that_do_not_fit_are_refused(
    bert: Path,
    make_model_context: MakeModelContext,
    inputs: Any,
    outputs: Any,
    parameters: dict[str, Any],
    words: str,
) -> None:
    """With the name and what is allowed."""
    with pytest.raises(InvalidArgumentError) as caught:
        load_backend(EncoderBackend, make_model_context(inputs, outputs, **parameters))
    assert words in caught.value.message


@pytest.mark.parametrize(("fields", "words"), [
    ({"dtype": "float99"}, "dtype must be one of float32, float16, bfloat16, got 'float99'"),
    ({"dtype": "bfloat16", "intermediate_size": "x"}, "intermediate_size must be a whole number above 0, got 'x'"),
    ({"type_vocab_size": 1}, "type_vocab_size must be above 1, as the tokenizer has types to 1, got 1"),
])  # fmt: skip
def test_folders_that_do_not_fit_are_refused(
    version_folder: Path, make_model_context: MakeModelContext, fields: dict[str, Any], words: str
) -> None:
    """Before a request fails, and others of its batch with it."""
    own = {name: value for name, value in fields.items() if name == "type_vocab_size"}
    save_encoder(version_folder, "BertForSequenceClassification", num_labels=1, **own)
    save_tokenizer(version_folder)
    changed_config(version_folder, **fields)
    with pytest.raises(InvalidArgumentError) as caught:
        load_backend(EncoderBackend, make_model_context(PAIRS, {"scores": ("FP32", (1,))}))
    assert words in caught.value.message


def test_tensors_follow_from_the_folder(bert: Path) -> None:
    """Those that are declared are left alone."""
    made = EncoderBackend.auto_complete({"name": "m"}, bert)
    assert (32, {}) == (made["max_batch_size"], made["dynamic_batching"])
    assert ["text", "input_ids", "truncate_prompt_tokens"] == [one["name"] for one in made["input"]]
    assert {"name": "embedding", "data_type": "TYPE_FP32", "dims": [64]} == made["output"][0]
    declared = {"output": [{"name": "embedding"}]}
    assert declared == EncoderBackend.auto_complete(dict(declared), bert)
    changed_config(bert, architectures=["BertForSequenceClassification"], id2label={"0": "a", "1": "b", "2": "c"})
    made = EncoderBackend.auto_complete({"max_batch_size": 4}, bert)
    assert [("text", False), ("text_pair", True)] == [(one["name"], one["optional"]) for one in made["input"][:2]]
    assert (4, [3]) == (made["max_batch_size"], made["output"][0]["dims"])
