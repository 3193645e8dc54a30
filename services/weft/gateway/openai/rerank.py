"""``/rerank`` and ``/score``, as Jina, Cohere and vLLM have them: how well texts fit one another."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from starlette.types import ASGIApp
from typing_extensions import override

from weft.base.signature import TensorSpec
from weft.gateway.errors import RequestError
from weft.gateway.http.responding import json_array_response
from weft.gateway.openai.completions import MAX_PROMPT_CHARS
from weft.gateway.openai.embeddings import MAX_INPUTS, SHARED, RowModel, RowRequest, rows_of
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.fields import Field, Fields, boolean, checked_string, integer, shown, unsupported
from weft.gateway.openai.text_request import timeout_s


class ScoreModel(RowModel):
    """A cross-encoder: a pair of texts in, one score out."""

    lacks: ClassVar[str] = "makes no scores: it needs two text inputs, BYTES [1], and one output FP32 [1]"

    @override
    @classmethod
    def fits(cls, texts: Sequence[TensorSpec], values: TensorSpec) -> bool:
        return len(texts) == 2 and values.dims == (1,)


def _documents(fields: Fields, name: str) -> list[str]:
    given, texts = fields.array(name, MAX_INPUTS), []
    for index, one in enumerate(given or ()):
        text, param = one, f"{name}[{index}]"
        if isinstance(one, dict):
            inner = fields.inner(one, param)
            text, param = inner.raw("text"), f"{param}.text"
            inner.finish()
        texts.append(checked_string(text, param, max_chars=MAX_PROMPT_CHARS))
    if not texts:
        raise RequestError(f"'{name}' must be an array of at least one text, got {shown(given)}", param=name)
    return texts


def _texts(fields: Fields, name: str, *, max_items: int = MAX_INPUTS) -> list[str]:
    given = fields.raw(name)
    if max_items > 1 and isinstance(given, list):
        return _documents(fields, name)
    return [checked_string(given, name, max_chars=MAX_PROMPT_CHARS)]


def _activation(fields: Fields, name: str) -> None:
    if fields.boolean(name) is False:
        raise RequestError(f"'{name}' must be true: scores are as the model's configuration says", param=name)


_ACTIVATION = Field("use_activation", "`true`", "scores are as the model's configuration says", "true", _activation)
_TEXTS = f"array of up to {MAX_INPUTS} strings, or objects with `text`"
_RERANK = (
    Field("query", "string", "what is looked for", "required", partial(_texts, max_items=1)),
    Field("documents", _TEXTS, "each gets a score", "required", _documents),
    integer("top_n", 0, MAX_INPUTS, "so many of the best; 0: all", "0"),
    boolean("return_documents", "results have the texts", "true"),
    unsupported("max_tokens_per_doc", "use 'truncate_prompt_tokens'"),
    unsupported("rank_fields", "give documents as texts", (["text"],)),
    _ACTIVATION,
    *SHARED,
)
_SIDE = f"string, or an array of up to {MAX_INPUTS}"
_SCORE = (
    Field("text_1", _SIDE, "one text is compared with each of `text_2`", "required", _texts),
    Field("text_2", _SIDE, "as many as `text_1`, or any number beside one", "required", _texts),
    _ACTIVATION,
    *SHARED,
)


def parse_rerank(fields: Fields, headers: Mapping[str, str]) -> RowRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    own = fields.read(_RERANK)
    columns = [own["query"] * len(own["documents"]), own["documents"]]
    return RowRequest(own, columns, timeout_s(fields, headers))


async def _respond_rerank(request: RowRequest, model: ScoreModel, call: EndpointCall) -> ASGIApp:
    rows, usage = await rows_of(request, model, call, "score")
    scores, texts, fields = rows[:, 0].tolist(), request.columns[1], request.fields
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.get("top_n") or None]
    results = (
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if fields.get("return_documents", True) else {})
        for index in best
    )
    head = {"id": f"rerank-{uuid.uuid4().hex}", "model": request.model, "usage": usage}
    return await json_array_response(head, "results", results)


def parse_score(fields: Fields, headers: Mapping[str, str]) -> RowRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    own = fields.read(_SCORE)
    left, right = own["text_1"], own["text_2"]
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right):
        raise RequestError(
            f"'text_1' has {len(left)} texts and 'text_2' {len(right)}; send as many of both, or one 'text_1'",
            param="text_2",
        )
    return RowRequest(own, [left, right], timeout_s(fields, headers))


async def _respond_score(request: RowRequest, model: ScoreModel, call: EndpointCall) -> ASGIApp:
    rows, usage = await rows_of(request, model, call, "score")
    data = ({"index": i, "object": "score", "score": score} for i, score in enumerate(rows[:, 0].tolist()))
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": request.model}
    return await json_array_response(head | {"usage": usage}, "data", data)


RERANK = Endpoint("/v1/rerank", ScoreModel, parse_rerank, _respond_rerank, _RERANK)
SCORE = Endpoint("/v1/score", ScoreModel, parse_score, _respond_score, _SCORE)
#: Both, also at the paths where Cohere's clients and older ones of vLLM look for them.
ENDPOINTS = (
    RERANK,
    *(replace(RERANK, path=path) for path in ("/rerank", "/v2/rerank")),
    SCORE,
    replace(SCORE, path="/score"),
)
