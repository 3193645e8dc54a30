"""``/v1/responses``: OpenAI's newer interface to a chat, of items; nothing is kept between requests."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from weft.base.errors import WeftError
from weft.gateway.errors import openai_body
from weft.gateway.http.responding import DONE
from weft.gateway.openai.answer import CONTENT, REASONING, TOOL_CALLS, AnswerForm
from weft.gateway.openai.chat import ChatRequest
from weft.gateway.openai.endpoint import Endpoint
from weft.gateway.openai.generate import TokenLogprobs
from weft.gateway.openai.parts import Part, PartWriter, part_response
from weft.gateway.openai.responses.request import FIELDS, NOTHING_KEPT, parse
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.writing import Event

#: Of an item's id, and names of the events of its text, by kinds of parts.
_PREFIXES = {CONTENT: "msg_", REASONING: "rs_", TOOL_CALLS: "fc_"}
_EVENTS = {CONTENT: "output_text", REASONING: "reasoning_text", TOOL_CALLS: "function_call_arguments"}
#: Codes of errors, by the types that other endpoints give them.
_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


class ResponseWriter(PartWriter):
    """Each part is an item; a text or reasoning has one part of content."""

    id_prefix: ClassVar[str] = "resp_"
    end: ClassVar[bytes] = DONE

    def __init__(self, request: ChatRequest, form: AnswerForm) -> None:
        super().__init__(request, form)
        self._created = int(time.time())
        self._num_events = 0
        self._ids: list[str] = []

    @override
    def begin(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    @override
    def begin_part(self, part: Part) -> Iterator[Event]:
        self._ids.append(_PREFIXES[part.kind] + uuid.uuid4().hex)
        yield self._event("output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind != TOOL_CALLS:
            yield self._event("content_part.added", **self._place(part), part=self._content(part))

    @override
    def add(self, part: Part, text: str, logprobs: Sequence[TokenLogprobs]) -> Iterator[Event]:
        yield self._event(
            f"{_EVENTS[part.kind]}.delta", **self._place(part), delta=text, **self._logprobs_of(part, logprobs)
        )

    @override
    def end_part(self, part: Part) -> Iterator[Event]:
        place = self._place(part)
        if part.kind == TOOL_CALLS:
            yield self._event("function_call_arguments.done", **place, name=part.name, arguments=part.text)
        else:
            more = self._logprobs_of(part, part.logprobs)
            yield self._event(f"{_EVENTS[part.kind]}.done", **place, text=part.text, **more)
            yield self._event("content_part.done", **place, part=self._content(part))
        yield self._event("output_item.done", output_index=part.index, item=self._item(part))

    @override
    def end_answer(self) -> Iterator[Event]:
        if not self.parts:
            yield from self.open_part(CONTENT)
            yield from self.close_part()
        answer = self.answer()
        yield self._event(answer["status"], response=answer)

    @override
    def answer(self) -> dict[str, Any]:
        return self._response("incomplete" if self.finish_reason == "length" else "completed")

    @override
    def error_body(self, error: WeftError) -> dict[str, Any]:
        if self._is_open:
            self.parts[-1].is_cut = True
        told = openai_body(error)["error"]
        failure = {"code": _CODES.get(told["type"], "server_error"), "message": told["message"]}
        return self._event("failed", response=self._response("failed", failure))

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": f"response.{name}", "sequence_number": self._num_events - 1, **fields}

    def _place(self, part: Part) -> dict[str, Any]:
        place = {"item_id": self._ids[part.index], "output_index": part.index}
        return place if part.kind == TOOL_CALLS else {**place, "content_index": 0}

    def _response(self, status: str, error: Mapping[str, str] | None = None) -> dict[str, Any]:
        has_ended = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.request.model,
            "output": [self._item(part) for part in self.parts] if status != "in_progress" else [],
            "usage": self._usage() if has_ended else None,
            **self.request.repeated,
        }

    def _usage(self) -> dict[str, Any] | None:
        usage = self.usage.as_json()
        return usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": sum(self.usage.num_cached_tokens.values())},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, part: Part, status: str = "") -> dict[str, Any]:
        own_id, is_new = self._ids[part.index], bool(status)
        status = status or ("incomplete" if part.is_cut else "completed")
        content = [] if is_new else [self._content(part)]
        if part.kind == REASONING:
            return {"id": own_id, "type": "reasoning", "summary": [], "content": content, "status": status}
        if part.kind == CONTENT:
            return {"id": own_id, "type": "message", "role": "assistant", "status": status, "content": content}
        call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
        return {"id": own_id, "type": "function_call", "status": status, **call}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind == REASONING:
            return {"type": "reasoning_text", "text": part.text}
        logprobs = self._logprobs_of(part, part.logprobs)
        return {"type": "output_text", "text": part.text, "annotations": [], **logprobs}

    def _logprobs_of(self, part: Part, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The field of a text; without effect it is empty."""
        if part.kind != CONTENT:
            return {}
        num_top = self.request.common.sampling.get("logprobs", 0)
        return {"logprobs": [{**one, "top_logprobs": one["top_logprobs"][:num_top]} for one in tokens]}


_respond = partial(part_response, writer=ResponseWriter)
ENDPOINT = Endpoint("/v1/responses", TextModel, parse, _respond, FIELDS, nothing_below=NOTHING_KEPT, operation="chat")
