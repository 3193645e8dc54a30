"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat, and the grammar of calls that they force."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.text.suggestion import suggestion
from weft.gateway.errors import RequestError
from weft.gateway.json_text import is_encodable
from weft.gateway.openai.fields import Field, Fields, boolean, shown
from weft.gateway.openai.tools.formats import ForcedCalls, Schemas

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
#: Whitespace as ``json.dumps`` writes it, an option of llguidance: a model could go on with it without end.
_SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
#: Parameters of a function that declares none.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and what the model may or must do with them.

    Attributes:
        tools: As the request has them, for the chat template.
        schemas: JSON schemas of parameters, by names of functions.
        forced: Functions one of which must be called; empty: the model decides.
        is_parallel: Whether an answer may have several calls.
    """

    tools: Sequence[Mapping[str, Any]]
    schemas: Schemas
    forced: Sequence[str] = ()
    is_parallel: bool = True

    def grammar(self, calls: ForcedCalls) -> str:
        """Grammar in Lark's syntax of an answer that consists of forced calls, behind the opening of the first."""
        heads = [f'{{"name": "{name}", "{calls.key}": ' for name in self.forced]
        rules = [
            f"start: call ({json.dumps(calls.separator)} call)*" if self.is_parallel else "start: call",
            "call: " + " | ".join(f"call_{index}" for index in range(len(heads))),
        ]
        for index, (name, head) in enumerate(zip(self.forced, heads, strict=True)):
            rules.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
            rules.append(f"arguments_{index}: %json {json.dumps({**self.schemas[name], **_SPACING})}")
        return "\n".join(rules)


def _tools(fields: Fields, name: str) -> tuple[list[Any], Schemas] | None:
    """The tools, and the schemas of their parameters."""
    given = fields.array(name, MAX_TOOLS)
    if not given:
        return None
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(given):
        name, schema = _function(tool, f"tools[{index}]")
        if name in schemas:
            raise RequestError(f"'tools[{index}].function.name' is '{name}' again; give each name once", param="tools")
        schemas[name] = schema
    if not is_encodable(json.dumps(given, ensure_ascii=False)):
        raise RequestError("'tools' has half of a surrogate pair; send whole characters", param="tools")
    return given, schemas


TOOL_FIELDS = (
    Field("tools", f"array of up to {MAX_TOOLS} functions", "functions that the model may call", read=_tools),
    Field(
        "tool_choice",
        "`auto`, `none`, `required`, or an object that names a function",
        "whether it calls one",
        "auto",
        Fields.raw,
    ),
    boolean("parallel_tool_calls", "an answer may have several calls", "true"),
)


def parse_tool_use(own: Mapping[str, Any]) -> ToolUse | None:
    """The tools, from the values of ``TOOL_FIELDS``; None: there are none, or the model may not call them.

    Raises RequestError.
    """
    given, schemas = own.get("tools", ((), {}))
    choice, is_parallel = own.get("tool_choice"), own.get("parallel_tool_calls", True)
    if choice == "none" or (not given and choice in (None, "auto")):
        return None
    if not given:
        raise RequestError("'tool_choice' needs 'tools'; give them, or leave it out", param="tool_choice")
    if choice in (None, "auto"):
        return ToolUse(given, schemas, (), is_parallel)
    if choice == "required":
        return ToolUse(given, schemas, tuple(schemas), is_parallel)
    return ToolUse(given, schemas, (_named(choice, schemas),), is_parallel=False)


def _function(tool: Any, path: str) -> tuple[str, Mapping[str, Any]]:
    """Name and schema of a tool."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise RequestError(
            f"'{path}' must be an object with 'type': \"function\" and an object 'function', got "
            f"{shown(tool['type']) if isinstance(tool, dict) and 'type' in tool else shown(tool)}",
            param=path,
        )
    function = Fields(tool["function"], f"{path}.function")
    name, param = function.raw("name"), function.param("name")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise RequestError(
            f"'{param}' must be 1 to 256 letters, digits and characters of _.:/-, got {shown(name)}", param=param
        )
    function.string("description", max_chars=1 << 20)
    function.boolean("strict")
    schema: dict[str, Any] | None = function.raw("parameters")
    if not function.object("parameters") or not schema:
        return name, _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        param = f"{function.param('parameters')}.type"
        raise RequestError(f"'{param}' must be \"object\", got {shown(schema['type'])}", param=param)
    if not isinstance(schema.get("properties", {}), dict):
        param = f"{function.param('parameters')}.properties"
        raise RequestError(f"'{param}' must be an object, got {shown(schema['properties'])}", param=param)
    return name, {"type": "object"} | schema


def _named(choice: Any, schemas: Schemas) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise RequestError(
            '\'tool_choice\' must be "auto", "none", "required", or '
            f'{{"type": "function", "function": {{"name": NAME}}}}, got {shown(choice)}',
            param="tool_choice",
        )
    if not isinstance(name, str) or name not in schemas:
        known = suggestion(name, schemas) if isinstance(name, str) else ""
        raise RequestError(
            f"'tool_choice.function.name' is {shown(name)}, which is not among 'tools'{known}; they have "
            f"{', '.join(list(schemas)[:20])}",
            param="tool_choice",
        )
    return name
