"""``/openapi.json``: the HTTP interface as OpenAPI 3.1, made of its routes, tables of fields and protobuf messages.

What cannot be derived, such as examples, is in ``openapi.json`` beside this module: by path, or by the name of an RPC
or a field. The schema of an answer without one follows from its examples. Of an operation, ``answers`` are examples, of
which later ones have the fields that differ from the first; ``answer`` is the schema of its JSON, and ``body`` has both
of the request's; a path in their place has the same.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Kind
from starlette.routing import Route

from weft import __version__
from weft.base.errors import WeftError
from weft.gateway.errors import STATUSES, RequestError, anthropic_body, openai_body, v2_body
from weft.gateway.openai.endpoint import Endpoint
from weft.gateway.openai.fields import Field
from weft.gateway.v2.routes import CALLS, PREFIX, endpoint_of
from weft_protos import grpc_service_pb2 as pb

PATH = "/openapi.json"
Json = dict[str, Any]

_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
#: Names of errors, by the function that formats them, of V2 and of each endpoint.
_ERRORS: Mapping[Callable[[WeftError], Json], str] = {
    openai_body: "OpenAIError", anthropic_body: "AnthropicError", v2_body: "V2Error",
}  # fmt: skip
_TYPES: Mapping[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip
#: Of those fields of messages that are no integers.
_SCALARS: Mapping[int, str] = {
    Kind.CPPTYPE_STRING: "string", Kind.CPPTYPE_BOOL: "boolean",
    Kind.CPPTYPE_FLOAT: "number", Kind.CPPTYPE_DOUBLE: "number",
}  # fmt: skip


def document(routes: Iterable[Route], endpoints: Collection[Endpoint]) -> Json:
    """The document for these routes, made in some 10 ms; those of ``endpoints`` are among them."""
    facts = json.loads(files(__package__).joinpath("openapi.json").read_bytes())
    messages, paths = dict[str, Json](), dict[str, Json]()
    calls = {(call.method, PREFIX + path): call.rpc for call in reversed(CALLS) for path in call.paths}
    known, by_path = facts["paths"], {one.path: one for one in endpoints}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            rpc, served = calls.get((method, route.path)), by_path.get(route.path)
            own = known.get(path.replace("/versions/{version}", ""), {}).get(method.lower(), {})
            own = _written(own, known)
            if rpc is not None:
                own = _merged(_call(rpc, messages), _written(facts["x-rpcs"].get(rpc, {}), known))
                if method == "GET":  # of the two that share an RPC, that without a body
                    own.pop("requestBody", None)
            elif served is not None:
                own = _merged(_endpoint(served, own, facts["x-fields"]), own)
            body = served.error_body if served else v2_body if endpoint_of(path) else openai_body
            paths.setdefault(path, {})[method.lower()] = _merged(_operation(method, path, _ERRORS[body]), own)
    for content in (one for path in paths.values() for each in path.values() for one in _contents(each)):
        if "examples" in content and "schema" not in content:
            content["schema"] = schema_like(*(one["value"] for one in content["examples"].values()))
    examples = (RequestError("message"), RequestError("message", param="field", code="code"))
    schemas = {name: schema_like(*map(body, examples)) for body, name in _ERRORS.items()}
    responses = {name: {"description": "An error.", **_content(schema)} for name, schema in schemas.items()}
    return {
        "openapi": "3.1.0",
        "info": {"version": __version__, **facts["info"]},
        "security": facts["security"],
        "paths": dict(sorted(paths.items())),
        "components": _merged(facts["components"], {"responses": responses, "schemas": messages}),
    }


def encoded(routes: Iterable[Route], endpoints: Collection[Endpoint]) -> bytes:
    """The document as JSON."""
    return json.dumps(document(routes, endpoints)).encode()


def _operation(method: str, path: str, error: str) -> Json:
    first, *rest = filter(None, re.split(r"\W", f"{method.lower()}{path}"))
    statuses = STATUSES if method == "POST" else [status for status in STATUSES if status not in (408, 413)]
    refused = {str(status): {"$ref": f"#/components/responses/{error}"} for status in statuses}
    return {
        "operationId": first + "".join(word[0].upper() + word[1:] for word in rest),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(path)
        ],
        "responses": {"200": {"description": "The answer."}, **refused},
    }


def _written(facts: Json, known: Json) -> Json:
    """The facts of an operation as OpenAPI has them."""
    own = {
        name: known[value]["post"][name] if isinstance(value, str) and value in known else value
        for name, value in facts.items()
    }
    if "body" in own:
        own["requestBody"] = {"content": {"application/json": own.pop("body")}}
    content = {"schema": own.pop("answer")} if "answer" in own else {}
    if "answers" in own:
        first, *_ = own["answers"].values()
        content["examples"] = {name: {"value": first | value} for name, value in own.pop("answers").items()}
    return _merged({"responses": {"200": {"content": {"application/json": content}}}}, own) if content else own


def _content(schema: Json) -> Json:
    return {"content": {"application/json": {"schema": schema}}}


def _contents(operation: Json) -> Iterable[Json]:
    return (content for one in operation["responses"].values() for content in one.get("content", {}).values())


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


def _endpoint(served: Endpoint, own: Json, known: Json) -> Json:
    media = [*own["responses"]["200"]["content"]] if own else ["application/json"]
    if any(row.name == "stream" and row.support == "yes" for row in served.fields):
        media.append("text/event-stream")
    return {
        "requestBody": {"required": True, **_content(_object(served.fields, known))},
        "responses": {"200": {"content": {name: {} for name in media}}},
    }


def _object(rows: Collection[Field], known: Json) -> Json:
    """Schema of an object of a table; fields that it does not have are taken, and listed as ignored."""
    schema: Json = {"type": "object", "properties": {row.name: _row(row, known) for row in rows}}
    required = [row.name for row in rows if row.default == "required"]
    return {**schema, "required": required} if required else schema


def _row(row: Field, known: Json) -> Json:
    told = _LINK.sub(r"\1", row.effect)
    if row.support == "ignored":
        return {"description": "Taken, without effect."}
    if row.support == "no":
        return {"description": f"Not supported. {told}".strip(), "enum": [None, False, "", [], {}, *row.harmless]}
    schema = _object(row.fields, known) if row.fields else dict(row.schema or known.get(row.name, {}))
    if row.default != "required":  # a null field counts as absent
        if "anyOf" in schema:
            schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
        if "type" in schema:
            schema["type"] = [schema["type"], "null"]
        if "enum" in schema:
            schema["enum"] = [*schema["enum"], None]
        told += f" (default: {row.default})" if row.default else ""
    return {"description": told, **schema}


def _call(rpc: str, messages: dict[str, Json]) -> Json:
    """What is known of a call of the router: the fields of its answer, which ``to_json`` writes."""
    answer = _content(_message(getattr(pb, f"{rpc}Response").DESCRIPTOR, messages))
    return {"summary": f"The RPC {rpc}.", "tags": ["V2"], "responses": {"200": answer}}


def _message(message: Descriptor, messages: dict[str, Json]) -> Json:
    """A reference to the schema of a message, which is added to ``messages`` with those that it has."""
    name = message.full_name.removeprefix("inference.")
    if name not in messages:
        schema = messages[name] = {"type": "object"}  # before its fields, which may be of its own kind
        schema["properties"] = {field.name: _field(field, messages) for field in message.fields}
        schema["required"] = [field.name for field in message.fields if not field.has_presence]
    return {"$ref": f"#/components/schemas/{name}"}


def _field(field: Kind, messages: dict[str, Json]) -> Json:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _field(field.message_type.fields_by_name["value"], messages)}
    if field.message_type is not None:
        one = _message(field.message_type, messages)
    elif field.enum_type is not None:
        one = {"enum": [value.name for value in field.enum_type.values]}
    else:
        one = {"type": _SCALARS.get(field.cpp_type, "integer")}
    return {"type": "array", "items": one} if field.is_repeated else one
