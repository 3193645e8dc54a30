"""The cases of the Open Responses compliance test (openresponses/openresponses), with its schemas.

    python tests/exams/open_responses.py URL MODEL

Needs the package ``openresponses-types``, and nothing of Weft. Calls are asked for as text that the model says, so that
a model that repeats its prompt will do. Prints what failed, and last how many cases and how many passed.
"""

import json
import sys
import urllib.error
import urllib.request
from typing import Any

from openresponses_types import types

EVENTS = {
    kind.value: schema
    for name, schema in vars(types).items()
    if name.endswith("StreamingEvent")
    for kind in schema.model_fields["type"].annotation
}
ENDS = ("response.completed", "response.failed", "response.incomplete")
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CALL = '<tool_call> {"name": "get_weather", "arguments": {"location": "Bonn"}} </tool_call>'
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CASES: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [said("Say hello.")]},
    "streaming-response": {"stream": True, "input": [said("Count to five.")]},
    "system-prompt": {"input": [said("Be a pirate.", "system"), said("Say hello.")]},
    "tool-calling": {"input": [said(CALL)], "tools": [TOOL]},
    "tool-calling-streaming": {"stream": True, "input": [said(CALL)], "tools": [TOOL]},
    "image-input": {"input": [said([{"type": "input_text", "text": "What is it?"}, PICTURE])]},
    "multi-turn": {"input": [said("I am Ada."), said("Hello, Ada!", "assistant"), said("Who am I?")]},
}


def faults(url: str, body: dict[str, Any]) -> list[str]:
    """What is wrong with the answer."""
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/responses", json.dumps(body).encode(), headers)
        ) as got:
            text = got.read().decode()
    except urllib.error.HTTPError as error:
        return [f"{error.code}: {error.read().decode()[:200]}"]
    found, final, seen = [], None, set()
    for line in text.splitlines() if body.get("stream") else ():
        data = line.removeprefix("data: ")
        if data in (line, "[DONE]"):
            continue
        event = json.loads(data)
        seen.add(event["type"])
        found += invalid(EVENTS.get(event["type"]), event, event["type"])
        final = event["response"] if event["type"] in ENDS else final
    answer: dict[str, Any] = final if body.get("stream") else json.loads(text)
    found += invalid(types.ResponseResource, answer, "response")
    kinds = [item["type"] for item in answer["output"]]
    if "tools" in body:
        found += [] if "function_call" in kinds else [f"no call among {kinds}"]
        wanted = (
            {f"response.function_call_arguments.{name}" for name in ("delta", "done")} if body.get("stream") else set()
        )
        found += [f"no event {name}" for name in wanted - seen]
    return found + ([] if kinds and answer["status"] == "completed" else [f"{answer['status']}, {len(kinds)} items"])


def invalid(schema: Any, value: Any, name: str) -> list[str]:
    """Why a value does not fit a schema."""
    try:
        if schema is None:
            raise ValueError("it is unknown")
        schema.model_validate(value)
    except ValueError as error:
        return [f"{name}: {str(error)[:400]}"]
    return []


def main() -> None:
    url, model = sys.argv[1:]
    failed = 0
    for name, body in CASES.items():
        if found := faults(url, {"model": model, **body}):
            failed += 1
            print(f"{name}: {'; '.join(found)}")
    print(json.dumps({"cases": len(CASES), "passed": len(CASES) - failed}))


if __name__ == "__main__":
    main()
