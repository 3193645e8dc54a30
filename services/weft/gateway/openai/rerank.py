"""``/rerank`` and ``/score``, as Jina, Cohere and vLLM have them: how well texts fit one another."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import override

from weft.base.signature import TensorSpec
from weft.gateway.errors import RequestError
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


@dataclass(frozen=True, slots=True)
class RerankRequest(RowRequest):
    """A validated body; ``top_n`` of 0: all documents."""

    top_n: int
    returns_documents: bool


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
_RERANK = (
    Field("query", "string", "what is looked for", "required", partial(_texts, max_items=1)),
    Field(
        "documents",
        f"array of up to {MAX_INPUTS} strings, or objects with `text`",
        "each gets a score",
        "required",
        _documents,
    ),
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


def parse_rerank(fields: Fields, headers: Mapping[str, str]) -> RerankRequest:
    """Parse a body. Raises RequestError, or DeadlineExceededError for a timeout of 0."""
    own = fields.read(_RERANK)
    columns = [own["query"] * len(own["documents"]), own["documents"]]
    rest = {"top_n": own.get("top_n", 0), "returns_documents": own.get("return_documents", True)}
    return RerankRequest.read(own, columns, timeout_s(fields, headers), **rest)


async def _respond_rerank(request: RerankRequest, model: ScoreModel, call: EndpointCall) -> ASGIApp:
    scores, usage = await _scores(request, model, call)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    texts = request.columns[1]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if request.returns_documents else {})
        for index in best
    ]
    body = {"id": f"rerank-{uuid.uuid4().hex}", "model": request.model, "usage": usage, "results": results}
    return JSONResponse(body)


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
    return RowRequest.read(own, [left, right], timeout_s(fields, headers))


async def _respond_score(request: RowRequest, model: ScoreModel, call: EndpointCall) -> ASGIApp:
    scores, usage = await _scores(request, model, call)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": request.model}
    return JSONResponse(head | {"data": data, "usage": usage})


async def _scores(request: RowRequest, model: ScoreModel, call: EndpointCall) -> tuple[list[float], dict[str, int]]:
    rows, num_tokens = await rows_of(request, model, call, "score")
    return rows[:, 0].tolist(), {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


RERANK = Endpoint("/v1/rerank", ScoreModel, parse_rerank, _respond_rerank, _RERANK)
SCORE = Endpoint("/v1/score", ScoreModel, parse_score, _respond_score, _SCORE)
#: Both, also at the paths where Cohere's clients and older ones of vLLM look for them.
ENDPOINTS = (
    RERANK,
    *(replace(RERANK, path=path) for path in ("/rerank", "/v2/rerank")),
    SCORE,
    replace(SCORE, path="/score"),
)
