"""``/openapi.json``: the HTTP interface as OpenAPI 3.1, made of its routes, tables of fields and protobuf messages.

What cannot be derived, such as examples of answers, is in ``openapi.json`` beside this module, by path or by the name
of an RPC; a schema that is missing there follows from the example.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from starlette.routing import Route

from weft import __version__
from weft.base.errors import WeftError
from weft.gateway.errors import STATUSES, RequestError, anthropic_body, openai_body, v2_body
from weft.gateway.openai.endpoint import Endpoint
from weft.gateway.openai.fields import Field
from weft.gateway.v2.routes import CALLS, PREFIX
from weft_protos import grpc_service_pb2 as pb

PATH = "/openapi.json"
Json = dict[str, Any]

_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
#: Of V2 and of each endpoint, by the function that formats them.
_ERRORS = {openai_body: "OpenAIError", anthropic_body: "AnthropicError", v2_body: "V2Error"}
_TYPES: Mapping[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip

_SCALARS = {
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
}


def document(routes: Iterable[Route], endpoints: Collection[Endpoint]) -> Json:
    """The document for these routes; those of ``endpoints`` are among them."""
    facts = _facts()
    calls = {(call.method, PREFIX + path): call.rpc for call in reversed(CALLS) for path in call.paths}
    by_path = {one.path: one for one in endpoints}
    paths: Json = {}
    messages: dict[str, Json] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            rpc, served = calls.get((method, route.path)), by_path.get(route.path)
            own = facts["paths"].get(path.replace("/versions/{version}", ""), {}).get(method.lower(), {})
            if rpc is not None:
                own = _merged(_call(rpc, messages), facts["x-rpcs"].get(rpc, {}))
                if method == "GET":  # of the two that share an RPC, that without a body
                    own.pop("requestBody", None)
            elif served is not None:
                own = _merged(_endpoint(served, own["responses"]["200"]["content"] if own else ()), own)
            error = served.error_body if served else v2_body if path.startswith(PREFIX + "/") else openai_body
            statuses = STATUSES if method == "POST" else [status for status in STATUSES if status not in (408, 413)]
            refused = {str(status): _ref("responses", _ERRORS[error]) for status in statuses}
            given = [_path_parameter(name) for name in _PARAMETER.findall(route.path)]
            responses = {"200": {"description": "The answer."}, **refused}
            base = {"operationId": _identifier(method.lower() + path), "parameters": given, "responses": responses}
            paths.setdefault(path, {})[method.lower()] = _with_schemas(_merged(base, own))
    errors = {name: _error(body) for body, name in _ERRORS.items()}
    shared = {"responses": {name: _answer(one) for name, one in errors.items()}, "schemas": messages}
    return {
        "openapi": "3.1.0",
        "info": {"version": __version__, **facts["info"]},
        "security": facts["security"],
        "paths": dict(sorted(paths.items())),
        "components": _merged(facts["components"], shared),
    }


@cache
def _facts() -> Json:
    found: Json = json.loads(files(__package__).joinpath("openapi.json").read_bytes())
    return found


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> Json:
    """Both; objects in both are merged, arrays joined, and else ``more`` counts."""
    made = dict(base)
    for name, value in more.items():
        old = made.get(name)
        if isinstance(old, dict) and isinstance(value, dict) and "$ref" not in old:
            made[name] = _merged(old, value)
        else:
            made[name] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value
    return made


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _identifier(text: str) -> str:
    first, *rest = filter(None, re.split(r"\W", text))
    return first + "".join(f"{word[0].upper()}{word[1:]}" for word in rest)


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _answer(schema: Json) -> Json:
    return {"description": "An error.", "content": {"application/json": {"schema": schema}}}


def _error(body: Callable[[WeftError], Json]) -> Json:
    return schema_like(body(RequestError("what is wrong, and the cure")), body(RequestError("", param="", code="")))


def _with_schemas(operation: Json) -> Json:
    """The operation, with schemas from the examples of answers that have none."""
    for response in operation["responses"].values():
        for content in response.get("content", {}).values():
            examples = [one["value"] for one in content.get("examples", {}).values()]
            examples += [content["example"]] if "example" in content else []
            if examples and "schema" not in content:
                content["schema"] = schema_like(*examples)
    return operation


def schema_like(*examples: Any) -> Json:
    """JSON schema of values like these: their types, and of objects the fields that all have."""
    types = list(dict.fromkeys(_TYPES[type(one)] for one in examples))
    if types == ["null"] or not types:
        return {}
    schema: Json = {"type": types[0] if len(types) == 1 else types}
    objects = [one for one in examples if isinstance(one, dict)]
    if objects:
        names = dict.fromkeys(name for one in objects for name in one)
        schema["properties"] = {name: schema_like(*(one[name] for one in objects if name in one)) for name in names}
        schema["required"] = [name for name in names if all(name in one for one in objects)]
    if "array" in types:
        schema["items"] = schema_like(*(item for one in examples if isinstance(one, list) for item in one))
    return schema


def _endpoint(served: Endpoint, media_types: Collection[str]) -> Json:
    media = [*(media_types or ["application/json"])]
    if any(row.name == "stream" and row.support == "yes" for row in served.fields):
        media.append("text/event-stream")
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _object(served.fields)}}},
        "responses": {"200": {"description": "The answer.", "content": {name: {} for name in media}}},
    }


def _object(rows: Iterable[Field]) -> Json:
    """Schema of an object of a table; fields that it does not have are taken, and listed as ignored."""
    rows = list(rows)
    required = [row.name for row in rows if row.default == "required"]
    schema: Json = {"type": "object", "properties": {row.name: _row(row) for row in rows}}
    return {**schema, "required": required} if required else schema


def _row(row: Field) -> Json:
    text = _LINK.sub(r"\1", row.effect)
    if row.support == "ignored":
        return {"description": "Taken, without effect."}
    if row.support == "no":
        told = f"Not supported: {text}" if text else "Not supported."
        return {"description": told, "enum": [None, False, "", [], {}, *row.harmless]}
    schema = _object(row.fields) if row.fields else dict(row.schema)
    if row.default != "required":  # a null field counts as absent
        if "anyOf" in schema:
            schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
        elif "type" in schema:
            schema["type"] = [schema["type"], "null"]
        if "enum" in schema:
            schema["enum"] = [*schema["enum"], None]
    default = f"Default: {row.default}" if row.default not in ("", "required") else ""
    told = "; ".join(filter(None, (text, default)))
    return {"description": told, **schema} if told else schema


def _call(rpc: str, messages: dict[str, Json]) -> Json:
    """What is known of a call of the router: the fields of its answer, which ``to_json`` writes."""
    answer = _message(getattr(pb, f"{rpc}Response").DESCRIPTOR, messages)
    content = {"application/json": {"schema": answer}}
    return {
        "summary": f"The RPC {rpc}.",
        "tags": ["V2"],
        "responses": {"200": {"description": "The answer.", "content": content}},
    }


def _message(message: Descriptor, messages: dict[str, Json]) -> Json:
    """A reference to the schema of a message, which is added to ``messages`` with those that it has."""
    name = message.full_name.removeprefix("inference.")
    if name not in messages:
        schema = messages[name] = {"type": "object"}  # before its fields, which may be of its own kind
        schema["properties"] = {field.name: _field(field, messages) for field in message.fields}
        schema["required"] = [field.name for field in message.fields if not field.has_presence]
    return _ref("schemas", name)


def _field(field: FieldDescriptor, messages: dict[str, Json]) -> Json:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _field(field.message_type.fields_by_name["value"], messages)}
    if field.message_type is not None:
        one = _message(field.message_type, messages)
    elif field.enum_type is not None:
        one = {"enum": [value.name for value in field.enum_type.values]}
    else:
        one = {"type": _SCALARS.get(field.cpp_type, "integer")}
    return {"type": "array", "items": one} if field.is_repeated else one
