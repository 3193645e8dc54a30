"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat, and the grammar of calls that they force."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from weft.base.text.suggestion import suggestion
from weft.gateway.errors import RequestError
from weft.gateway.openai.fields import Field, Fields, boolean, check_utf8, shown
from weft.gateway.openai.tools.formats import ForcedCalls, Schemas

MAX_TOOLS = 1024
#: Of a tool, besides a named one.
CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_SPECIAL = re.compile(r"(\[[A-Z_]+\])")
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
        """Grammar in Lark's syntax of an answer that consists of calls; of forced ones behind the first's opening."""
        names = self.forced or tuple(self.schemas)
        heads = [f'{{"name": "{name}", "{calls.key}": ' for name in names]
        opening = "" if self.forced or not calls.opening else _literal(calls.opening)
        rules = [
            f"start: {opening}call" + (f" ({json.dumps(calls.separator)} call)*" if self.is_parallel else ""),
            "call: " + " | ".join(f"call_{index}" for index in range(len(heads))),
        ]
        for index, (name, head) in enumerate(zip(names, heads, strict=True)):
            rules.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
            rules.append(f"arguments_{index}: %json {json.dumps({**self.schemas[name], **_SPACING})}")
        return "\n".join(rules)

    def free_grammar(self, around: tuple[str, str]) -> str:
        """The same of calls that are no JSON: the name of a function between two texts, then anything."""
        names = " | ".join(map(json.dumps, self.schemas))
        before, behind = map(json.dumps, around)
        return f"start: {before} ({names}) {behind} /(?s:.*)/"


def _literal(text: str) -> str:
    """A text in a rule, followed by a blank; the names of special tokens in it stand for these."""
    parts = _SPECIAL.split(text)  # names are every second one
    return "".join(f"<{part}> " if index % 2 else f"{json.dumps(part)} " for index, part in enumerate(parts) if part)


class Tool(NamedTuple):
    """A function: its name, the schema of its parameters, and what the chat template gets of it."""

    name: str
    schema: Mapping[str, Any]
    shown: Mapping[str, Any]


#: Tools as chat templates take them, and the schemas of their parameters.
Tools: TypeAlias = tuple[Sequence[Mapping[str, Any]], Schemas]


def tools_field(read: Callable[[Fields], Tool], kind: str = "function", default: str | None = None) -> Field:
    """A row for ``tools`` of a type, each of which ``read`` checks; its value is ``Tools``."""
    reading = partial(_tools, read=read, kind=kind, default=default)
    return Field("tools", f"array of up to {MAX_TOOLS} functions", "functions that the model may call", read=reading)


def _tools(fields: Fields, name: str, read: Callable[[Fields], Tool], kind: str, default: str | None) -> Tools | None:
    found: dict[str, Tool] = {}
    hints = {"": "; no tool is run here"}
    for _, value in fields.objects(name, MAX_TOOLS, (kind,), default=default, hints=hints):
        tool = read(value)
        if tool.name in found:
            raise RequestError(
                f"'{value.param('name')}' is '{tool.name}' again; give each name once", param=fields.param(name)
            )
        found[tool.name] = tool
    if not found:
        return None
    check_utf8(fields.raw(name), name)
    return [tool.shown for tool in found.values()], {tool.name: tool.schema for tool in found.values()}


def read_function(function: Fields, schema_name: str = "parameters") -> Tool:
    """A function with ``name``, ``description`` and a schema; what the template gets has the names of a chat."""
    name, param = function.raw("name"), function.param("name")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise RequestError(
            f"'{param}' must be 1 to 256 letters, digits and characters of _.:/-, got {shown(name)}", param=param
        )
    description = function.string("description", max_chars=1 << 20)
    function.boolean("strict")
    schema: dict[str, Any] = function.raw(schema_name) or {}
    function.object(schema_name)
    path = function.param(schema_name)
    if schema.get("type", "object") != "object":
        raise RequestError(f"'{path}.type' must be \"object\", got {shown(schema['type'])}", param=f"{path}.type")
    if not isinstance(schema.get("properties", {}), dict):
        param = f"{path}.properties"
        raise RequestError(f"'{param}' must be an object, got {shown(schema['properties'])}", param=param)
    told = {"name": name, "description": description, "parameters": function.raw(schema_name)}
    given = {key: value for key, value in told.items() if value is not None}
    checked = {"type": "object"} | schema if schema else _NO_PARAMETERS
    return Tool(name, checked, {"type": "function", "function": given})


def _chat_tool(tool: Fields) -> Tool:
    return read_function(tool.object("function") or tool.inner({}, tool.param("function")))._replace(shown=tool.values)


TOOL_FIELDS = (
    tools_field(_chat_tool),
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
    choice, named, param = own.get("tool_choice", "auto"), None, "tool_choice.function.name"
    if choice not in CHOICES:
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        named = function.get("name") if isinstance(function, dict) else None
        if named is None:
            raise RequestError(
                '\'tool_choice\' must be "auto", "none", "required", or '
                f'{{"type": "function", "function": {{"name": NAME}}}}, got {shown(choice)}',
                param="tool_choice",
            )
    return make_tool_use(own.get("tools"), choice, named, param, is_parallel=own.get("parallel_tool_calls", True))


def make_tool_use(
    tools: Tools | None, choice: Any, named: Any = None, param: str = "tool_choice.name", *, is_parallel: bool = True
) -> ToolUse | None:
    """The tools and how they may be used, by one of ``CHOICES``, or by the name of a function in the field ``param``.

    Raises RequestError: there are none to choose from, or none with the name.
    """
    given, schemas = tools or ((), {})
    if named is None and (choice == "none" or (not given and choice == "auto")):
        return None
    if not given:
        raise RequestError("'tool_choice' needs 'tools'; give them, or leave it out", param="tool_choice")
    if named is None:
        return ToolUse(given, schemas, tuple(schemas) if choice == "required" else (), is_parallel)
    if not isinstance(named, str) or named not in schemas:
        known = suggestion(named, schemas) if isinstance(named, str) else ""
        raise RequestError(
            f"'{param}' is {shown(named)}, which is not among 'tools'{known}; they have "
            f"{', '.join(list(schemas)[:20])}",
            param="tool_choice",
        )
    return ToolUse(given, schemas, (named,), is_parallel=False)
