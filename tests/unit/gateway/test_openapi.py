"""``/openapi.json`` follows from tables: what is added to them is in it."""

from typing import Any

import pytest
from openapi_spec_validator import validate
from starlette.routing import Route

from weft.gateway.main import ENDPOINTS
from weft.gateway.openai.endpoint import Endpoint
from weft.gateway.openai.fields import Field, integer, nested, one_of, unsupported
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openapi import document, schema_like
from weft.gateway.v2.routes import CALLS, PREFIX

FIELDS = (
    Field("model", "string", "its name", "required"),
    integer("n", 1, 9, "so [many](openai.md)", "1"),
    nested("style", (one_of("kind", ("a", "b"), "which"),)),
    unsupported("echo", "leave it out", (7,)),
    Field("odd", "a set", "anything"),
)


def test_a_new_endpoint_is_there_with_its_fields() -> None:
    """Types, bounds and defaults; null counts as absent where a field is optional; other fields may be anything."""
    added: Any = Endpoint("/v1/new", TextModel, lambda *_: None, lambda *_: None, FIELDS)  # type: ignore[arg-type, return-value]
    made = document([Route("/v1/new", lambda _: None, methods=["POST"])], [added])
    validate(made)
    operation = made["paths"]["/v1/new"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert ["model"] == schema["required"]
    assert {"type": ["integer", "null"], "minimum": 1, "maximum": 9, "description": "so many (default: 1)"} == schema[
        "properties"
    ]["n"]
    kind = schema["properties"]["style"]["properties"]["kind"]
    assert {"type": ["string", "null"], "enum": ["a", "b", None], "description": "which"} == kind
    assert {None, False, "", 7} <= {
        one for one in schema["properties"]["echo"]["enum"] if not isinstance(one, list | dict)
    }
    assert {"description": "anything"} == schema["properties"]["odd"]
    assert {"$ref": "#/components/responses/OpenAIError"} == operation["responses"]["429"]


def test_every_call_of_the_router_is_described_by_its_message() -> None:
    """Also those that share a path or an RPC; a way to ask without a body has none."""
    routes = [Route(PREFIX + path, lambda _: None, methods=[call.method]) for call in CALLS for path in call.paths]
    made = document(routes, ())
    validate(made)
    trace = made["paths"]["/v2/trace/setting"]
    assert ("requestBody" in trace["get"], "requestBody" in trace["post"]) == (False, True)
    assert {"$ref": "#/components/responses/V2Error"} == made["paths"]["/v2"]["get"]["responses"]["400"]
    assert {"name", "versions", "platform", "inputs", "outputs"} <= {
        *made["components"]["schemas"]["ModelMetadataResponse"]["properties"]
    }


def test_a_field_that_is_read_is_documented() -> None:
    """Each endpoint names the model that it wants, and what a stream is asked by."""
    made = document([Route(one.path, lambda _: None, methods=["POST"]) for one in ENDPOINTS], ENDPOINTS)
    validate(made)
    for one in ENDPOINTS:
        operation = made["paths"][one.path]["post"]
        fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert {row.name for row in one.fields} == {*fields}
        assert ("stream" in fields) == ("text/event-stream" in operation["responses"]["200"]["content"]), one.path


@pytest.mark.parametrize(
    ("examples", "schema"),
    [
        ((1, None), {"type": ["integer", "null"]}),
        ((None,), {}),
        (([],), {"type": "array", "items": {}}),
        (({"a": 1}, {"a": "", "b": True}),
         {"type": "object", "required": ["a"],
          "properties": {"a": {"type": ["integer", "string"]}, "b": {"type": "boolean"}}}),
    ],
)  # fmt: skip
def test_a_schema_follows_from_examples(examples: tuple[Any, ...], schema: dict[str, Any]) -> None:
    """Types of all of them; of objects the fields that all have are required."""
    assert schema == schema_like(*examples)
