"""Which grammar a request's output must follow, from the names by which clients ask for one: ``GrammarSpec``."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from weft.base.errors import InvalidArgumentError

_NAME = "structured_outputs"
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
#: Sampling parameters that also ask for a grammar: OpenAI's, and vLLM's older names.
ALIASES = ("response_format", *_GUIDED)

#: Largest grammar by its kind, in bytes of UTF-8.
_MAX_BYTES = {"json": 1 << 20, "choice": 1 << 18, "regex": 1 << 16, "grammar": 1 << 20}
_MAX_CHOICES = 4096
#: Longest text that a grammar forces as a whole; the time of a mask grows with it.
_MAX_LITERAL_CHARS = 8192
_ANY_OBJECT = '{"type":"object"}'
_ANY_OF = "any_of"
_MAX_ALTERNATIVES = 16
#: Whitespace between tokens of JSON; without an end a model may go on with it for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
#: A slash, which ends an expression in Lark; an escaped one does not.
_SLASH = re.compile(r"\\.|/", re.DOTALL)
#: GBNF has a rule ``root`` in place of Lark's.
LARK_START = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)
#: An option of vLLM beside the grammar.
_COMPACT = "disable_any_whitespace"
_JSON_OBJECT = "json_object"


class GrammarSpec(NamedTuple):
    """A grammar as text; equal ones share a compiled grammar.

    Attributes:
        kind: ``json`` (a JSON schema), ``regex``, ``choice`` (a JSON list of texts) or ``grammar`` (Lark or GBNF).
        name: Field of the request that it came from, for messages.
        is_compact: JSON without whitespace between its tokens.
    """

    kind: str
    text: str
    name: str = _NAME
    is_compact: bool = False

    @classmethod
    def parse(cls, value: object) -> "GrammarSpec | None":
        """Parse an object with one of the keys of ``_KINDS`` or ``any_of``, or its JSON text; None for no grammar.

        Raises:
            InvalidArgumentError: It is neither, asks for several grammars, or one is too large.
        """
        if value is None or isinstance(value, GrammarSpec):
            return value
        options = _from_json(_NAME, value)
        if not isinstance(options, Mapping):
            _refuse(_NAME, f"must be an object with one of {', '.join((*_KINDS, _ANY_OF))}", value)
        given = {key: each for key, each in options.items() if each is not None}
        is_compact = _flag(given, _COMPACT)
        if not _flag(given, _JSON_OBJECT):
            given.pop(_JSON_OBJECT, None)
        given.pop(_COMPACT, None)
        if not given:
            return None
        if len(given) > 1 or not given.keys() <= {*_KINDS, _ANY_OF}:
            _refuse(_NAME, f"must have exactly one of {', '.join((*_KINDS, _ANY_OF))}", list(options))
        [(key, grammar)] = given.items()
        if key == _ANY_OF:
            return GrammarSpec("grammar", _alternatives(grammar), f"{_NAME}.{key}")
        return _spec(key, f"{_NAME}.{key}", grammar, is_compact=is_compact)


def fold_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``response_format`` and ``guided_*`` among sampling parameters by ``structured_outputs``.

    Raises:
        InvalidArgumentError: A value is wrong, or there are several grammars.
    """
    try:
        specs = {name: spec for name in ALIASES if (spec := _alias(name, values.get(name))) is not None}
        if (own := GrammarSpec.parse(values.get(_NAME))) is not None:
            specs[_NAME] = own
    except RecursionError:
        raise InvalidArgumentError("the grammar is nested too deeply; take more names for its parts") from None
    if len(specs) > 1:
        raise InvalidArgumentError(f"only one of {' and '.join(specs)} can shape the output; leave the others out")
    others = {name: value for name, value in values.items() if name not in ALIASES and name != _NAME}
    return {**others, **({_NAME: next(iter(specs.values()))} if specs else {})}


def _alternatives(value: object) -> str:
    """Lark's grammar of a list of objects, each of which asks for a grammar as a request does."""
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_ALTERNATIVES:
        _refuse(f"{_NAME}.{_ANY_OF}", f"must be a list of 1 to {_MAX_ALTERNATIVES} objects", value)
    names = [f"any_{index}" for index in range(len(value))]
    rules = [f"start: {' | '.join(names)}"]
    for name, each in zip(names, value, strict=True):
        is_named = isinstance(each, Mapping) and bool(each) and each.keys() <= {*ALIASES, _NAME}
        spec = fold_aliases(each).get(_NAME) if is_named else GrammarSpec.parse(each)
        if spec is None:
            _refuse(f"{_NAME}.{_ANY_OF}", f"must have objects with one of {', '.join(_KINDS)} each", each)
        rules.append(f"{name}: {_RULES[spec.kind](spec)}")
    return "\n".join(rules)


def _json_rule(spec: GrammarSpec) -> str:
    schema = json.loads(spec.text)
    own = schema.get("x-guidance") or {}
    spacing = {"whitespace_flexible": False} if spec.is_compact else {"whitespace_pattern": WHITESPACE}
    if isinstance(own, Mapping) and "whitespace_flexible" not in own:
        schema["x-guidance"] = {**spacing, **own}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _lark_rule(spec: GrammarSpec) -> str:
    if not LARK_START.search(spec.text):
        _refuse(spec.name, "must be in Lark's syntax, with a rule 'start', to be one of several grammars", spec.text)
    return f"%lark {{\n{spec.text}\n}}"


def _escaped(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


#: By kind of a grammar: the right side of a rule for it.
_RULES: dict[str, Callable[[GrammarSpec], str]] = {
    "json": _json_rule,
    "regex": lambda spec: f"/{_SLASH.sub(_escaped, spec.text)}/",
    "choice": lambda spec: " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(spec.text)),
    "grammar": _lark_rule,
}


def _alias(name: str, value: object) -> GrammarSpec | None:
    if value is None:
        return None
    if name in _GUIDED:
        return _spec(_GUIDED[name], name, value)
    value = _from_json(name, value)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        _refuse(f"{name}.type", "must be 'text', 'json_object' or 'json_schema'", kind or value)
    if kind != "json_schema":
        return None if kind == "text" else GrammarSpec("json", _ANY_OBJECT, name)
    format_ = value.get("json_schema")
    if not isinstance(format_, Mapping) or format_.get("schema") is None:
        _refuse(f"{name}.json_schema", "must be an object with a 'schema'", format_)
    return _spec("json", f"{name}.json_schema.schema", format_["schema"])


def _spec(key: str, name: str, value: object, *, is_compact: bool = False) -> GrammarSpec:
    kind, text = _KINDS[key](name, value)
    if (num_bytes := len(text.encode("utf-8", "surrogatepass"))) > _MAX_BYTES[kind]:
        raise InvalidArgumentError(
            f"{name} has {num_bytes} bytes; at most {_MAX_BYTES[kind]} are taken: shorten it, or split the task"
        )
    return GrammarSpec(kind, text, name, is_compact)


def _json_schema(name: str, value: object) -> tuple[str, str]:
    schema = _from_json(name, value)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        _refuse(name, "must be a JSON schema: an object, or true", value)
    for literal in _literals(schema):
        if len(literal) > _MAX_LITERAL_CHARS:
            _refuse(name, f"must have no name, const or enum of more than {_MAX_LITERAL_CHARS} characters", literal)
    return "json", json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _flag(options: Mapping[str, object], key: str) -> bool:
    value = options.get(key, False)
    if not isinstance(value, bool):
        _refuse(f"{_NAME}.{key}", "must be true or false", value)
    return value


def _choice(name: str, value: object) -> tuple[str, str]:
    choices = _from_json(name, value)
    if (
        not isinstance(choices, list)
        or not 0 < len(choices) <= _MAX_CHOICES
        or not all(isinstance(each, str) and 0 < len(each) <= _MAX_LITERAL_CHARS for each in choices)
    ):
        limits = f"1 to {_MAX_CHOICES} texts of 1 to {_MAX_LITERAL_CHARS} characters"
        _refuse(name, f"must be a list of {limits}", value)
    return "choice", json.dumps(choices, ensure_ascii=False)


def _text(kind: str, name: str, value: object) -> tuple[str, str]:
    if not isinstance(value, str) or not value.strip():
        _refuse(name, "must be a text that is not empty", value)
    return kind, value


#: How each key of ``structured_outputs`` is read; the names are vLLM's, but for ``json_schema`` and ``lark``.
_KINDS: dict[str, Callable[[str, object], tuple[str, str]]] = {
    "json": _json_schema,
    "json_schema": _json_schema,
    _JSON_OBJECT: lambda name, value: ("json", _ANY_OBJECT),
    "regex": partial(_text, "regex"),
    "choice": _choice,
    "grammar": partial(_text, "grammar"),
    "lark": partial(_text, "grammar"),
}


def _literals(schema: object) -> Iterator[str]:
    """Texts of a schema that the output repeats: names of properties, and what is in ``const`` and ``enum``."""
    parts = [(schema, False)]
    while parts:
        part, is_literal = parts.pop()
        if isinstance(part, Mapping):
            yield from part
            parts += [(each, is_literal or key in ("const", "enum")) for key, each in part.items()]
        elif isinstance(part, list):
            parts += [(each, is_literal) for each in part]
        elif is_literal and isinstance(part, str):
            yield part


def _from_json(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} must be JSON: {error}, got {value!r:.80}") from None


def _refuse(name: str, problem: str, value: object) -> NoReturn:
    raise InvalidArgumentError(f"{name} {problem}, got {value!r:.80}")
