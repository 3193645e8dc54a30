"""Triton: language models, and the tokenizers and encoders around them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from tests.compat.graphs.shape import Arrays, Given, Model, Request, Shape, floats, integers, texts

_LLM = "triton-inference-server/tensorrtllm_backend: all_models"


def _tokenize(x: Given) -> Arrays:
    """Bytes as tokens; what must not be said only where something is given."""
    ids = np.array([list(x["QUERY"][0, 0])], np.int32)
    found = {"IDS": ids, "NUM_IDS": integers([ids.shape[1]])}
    if "LENGTH" in x:
        found["LENGTH"] = x["LENGTH"]
    bad = [word[0] for word in x["BAD_WORDS"][0]] if "BAD_WORDS" in x else [0]
    return {**found, "BAD_IDS": np.array([bad], np.int32)}


def _generated(x: Given) -> list[int]:
    """The prompt backwards, cut at its length; a temperature lifts each letter, words that are bad are left out."""
    ids = x["ids"][0, : int(x["num_ids"][0, 0])][::-1][: int(x["length"][0, 0])] + int(
        x.get("temperature", [[0]])[0][0]
    )
    return [int(token) for token in ids if token not in x["bad_ids"][0]]


def _result(tokens: list[int]) -> Arrays:
    ids = np.array([[tokens]], np.int32).reshape(1, 1, -1)
    return {"output_ids": ids, "num_output": integers([len(tokens)]), "cum_log_probs": floats([-len(tokens)])}


def _stream(x: Given) -> Iterator[Arrays]:
    for token in _generated(x):
        yield _result([token])


def _text(tokens: np.ndarray) -> np.ndarray:
    return texts(["".join(map(chr, tokens[0, 0]))])


_TOKENIZE = Model(
    "tokenize",
    "QUERY:BYTES:1 LENGTH:INT32:1 BAD_WORDS?:BYTES:-1",
    "IDS:INT32:-1 NUM_IDS:INT32:1 LENGTH:INT32:1 BAD_IDS:INT32:-1",
    _tokenize,
    8,
)
_GENERATE = Model(
    "llm",
    "ids:INT32:-1 num_ids:INT32:1 length:INT32:1 bad_ids:INT32:-1 "
    "runtime_top_k?:INT32:1 temperature?:FP32:1 seed?:UINT64:1 streaming?:BOOL:1",
    "output_ids:INT32:-1,-1 num_output:INT32:1 cum_log_probs:FP32:1",
    lambda x: _result(_generated(x)),
    8,
)
_DETOKENIZE = Model(
    "detokenize",
    "TOKENS:INT32:-1,-1 NUM:INT32:1 LOG_PROBS:FP32:1",
    "TEXT:BYTES:-1 OUT_LOG_PROBS:FP32:1",
    lambda x: {"TEXT": _text(x["TOKENS"]), "OUT_LOG_PROBS": x["LOG_PROBS"]},
    8,
)
_ASK = {"text_input": texts(["olleh"]), "max_tokens": integers([4])}
_LIFTED = {**_ASK, "temperature": floats([1]), "bad_words": texts(["i"])}


def _said(text: str, cost: float) -> Arrays:
    return {"text_output": texts([text]), "cum_log_probs": floats([-cost])}


TOKENIZE_ONLY = Model(
    "tokenize_only",
    "QUERY:BYTES:1 BAD_WORDS?:BYTES:-1",
    "IDS:INT32:-1 BAD_IDS:INT32:-1",
    _tokenize,
    200,
)
_SEE = Model(
    "see",
    "IMAGE?:FP16:3,-1,-1",
    "TABLE:FP16:-1,-1 SIZE:INT32:1",
    lambda x: {"TABLE": x["IMAGE"][:, 0], "SIZE": integers([x["IMAGE"].shape[2]])} if x else {},
    8,
)
_SEEING = Model(
    "llm",
    "ids:INT32:-1 table?:FP16:-1,-1 size?:INT32:1",
    "text:BYTES:1 index:INT32:1",
    lambda x: {
        "text": texts([f"{len(x['ids'][0])} letters, {x['size'][0, 0] if 'size' in x else 'no'} lines"]),
        "index": integers([0]),
    },
    8,
)
_TIDY = Model("tidy", "IN:BYTES:1", "OUT:BYTES:1", lambda x: {"OUT": texts([x["IN"][0, 0].decode() + "."])}, 8)

SHAPES = [
    Shape(
        "triton/guides/language_model.pbtxt",
        f"{_LLM}/inflight_batcher_llm/ensemble, {_LLM}/gpt/ensemble, {_LLM}/spec_decode/ensemble",
        [_TOKENIZE, _GENERATE, _DETOKENIZE],
        [Request(_ASK, _said("hell", 4)), Request(_LIFTED, _said("fmm", 3))],
    ),
    Shape(
        "triton/guides/language_stream.pbtxt",
        f"{_LLM}/inflight_batcher_llm/ensemble (decoupled)",
        [_TOKENIZE, replace(_GENERATE, answer=_stream, is_decoupled=True), _DETOKENIZE],
        [Request(_ASK, [_said(letter, 1) for letter in "hell"]), Request(_LIFTED, [_said(one, 1) for one in "fmm"])],
    ),
    Shape(
        "triton/guides/text_scores.pbtxt",
        f"{_LLM}/bert/ensemble",
        [
            TOKENIZE_ONLY,
            Model(
                "encoder",
                "ids:INT32:-1 bad_ids:INT32:-1",
                "logits:FP32:2",
                lambda x: {"logits": floats([x["ids"].sum(), x["bad_ids"].sum()])},
                200,
            ),
        ],
        [
            Request({"text_input": texts(["ab"])}, {"logits": floats([97 + 98, 0])}),
            Request({"text_input": texts(["ab"]), "bad_words": texts(["c", "d"])}, {"logits": floats([195, 199])}),
        ],
    ),
    Shape(
        "triton/guides/text_and_picture.pbtxt",
        f"{_LLM}/multimodal/ensemble",
        [TOKENIZE_ONLY, _SEE, _SEEING, _TIDY],
        [
            Request(
                {"text_input": texts(["abc"]), "image_input": np.ones((1, 3, 5, 2), np.float16)},
                {"text_output": texts(["3 letters, 5 lines."]), "index": integers([0])},
            ),
            Request(
                {"text_input": texts(["abc"])},
                {"text_output": texts(["3 letters, no lines."]), "index": integers([0])},
            ),
        ],
    ),
    Shape(
        "triton/guides/output_read_again.pbtxt",
        "triton-inference-server/fastertransformer_backend: all_models (gpt, gptj, gptneox, bloom, "
        "gpt-interactive-text-generation)",
        [
            _TOKENIZE,
            _GENERATE,
            replace(_DETOKENIZE, outputs="TEXT:BYTES:-1", answer=lambda x: {"TEXT": _text(x["TOKENS"])}),
        ],
        [
            Request(
                _ASK,
                {"text_output": texts(["hell"]), "num_output": integers([4]), "cum_log_probs": floats([-4])},
            ),
            Request(
                _ASK,
                {"num_output": integers([4])},
                outputs=("num_output",),
                called=["tokenize", "llm"],
            ),
        ],
    ),
]
