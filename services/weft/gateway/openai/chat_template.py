"""Chat templates: render messages into one prompt with the model's Jinja template, in a sandbox.

A template belongs to the model repository and is as trusted as that; messages are not trusted. The sandbox prevents
access to attributes of Python objects, imports and mutation.
"""

import functools
import io
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.text.suggestion import any_of
from weft.gateway.errors import RequestError

#: Put behind the first character of what would be a special token; no width, so that people see the same text.
BREAK = "\u200b"
#: Special tokens of common models, for one that does not name its own, as a graph around a language model.
_COMMON = r"<\|[^<>|\s]{1,64}\|>"
_MAX_COMMON_CHARS = 68
#: A text is searched by pieces: no other thread runs meanwhile.
_PIECE_CHARS = 1 << 16


def special_texts(listed: str, named: Iterable[str]) -> tuple[str, ...]:
    """Texts of a model's special tokens, from ``listed`` (a JSON list, or "") and from ``named``."""
    try:
        texts = json.loads(listed)
    except (ValueError, RecursionError):
        texts = []
    return tuple({text for text in (*(texts if isinstance(texts, list) else ()), *named) if isinstance(text, str)})


def breaker(texts: Iterable[str]) -> Callable[[str], str]:
    """Return a function that inserts ``BREAK`` into every special token of a text."""
    tokens = {text for text in texts if len(text) > 1}
    pattern = re.compile(f"{any_of(tokens)}|{_COMMON}")
    longest = max([_MAX_COMMON_CHARS, *map(len, tokens)])

    def broken(text: str) -> str:
        changed, position = io.StringIO(), 0
        while position < len(text):
            end = position + _PIECE_CHARS
            found = pattern.search(text, position, end + longest)
            if found is None or found.start() >= end:
                changed.write(text[position:end])
                position = end
            else:
                begin = found.start() + 1
                changed.write(text[position:begin] + BREAK + text[begin : found.end()])
                position = found.end()
        return changed.getvalue()

    return broken


def in_texts(change: Callable[[str], str], value: Any) -> Any:
    """Apply ``change`` to every string in a JSON value; objects keep their type."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return type(value)({change(name): in_texts(change, item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return [in_texts(change, item) for item in value]
    return value


#: Longest rendered prompt, in characters.
MAX_PROMPT_CHARS = 16 << 20
#: Time limit in seconds, checked at each output fragment, loop iteration and call.
MAX_RENDER_S = 5.0
MAX_TEMPLATE_BYTES = 1 << 20


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source, as in Hugging Face's ``tokenizer_config.json``.
        special_tokens: Texts of ``bos_token``, ``eos_token`` and others that the template may refer to.
        special_texts: Of all special tokens.

    Raises InvalidArgumentError: it does not compile, or is too long.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], special_texts: Sequence[str] = ()) -> None:
        self._template = _compiled(source)
        self._break = breaker((*special_texts, *special_tokens.values()))
        self._special_tokens = special_tokens
        #: For other templates OpenAI's role ``developer`` becomes ``system``, its older name.
        self.supports_developer_role = "developer" in source
        #: Whether it tells the model of tools.
        self.supports_tools = re.search(r"\btools\b", source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        continues: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        has_special_tokens: bool = False,
    ) -> str:
        """Render the prompt. Blocks as long as the template runs, so call it on a thread.

        Args:
            add_generation_prompt: Whether the prompt ends with the start of the assistant's message.
            variables: Additional template variables; they cannot override the above or any function.
            continues: Whether the prompt ends with the text of the last message.
            has_special_tokens: Whether a special token in messages, variables and tools is one; else it is text there,
                with an invisible character behind its first one.

        Raises:
            RequestError: The template rejects the messages, with its own message, or the prompt becomes too long.
            InternalError: The template fails.
        """
        if not has_special_tokens:
            try:
                messages, variables, tools = in_texts(self._break, [messages, dict(variables), tools])
            except RecursionError:
                raise RequestError("messages, 'tools' or 'chat_template_kwargs' are nested too deeply") from None
        mark = secrets.token_hex(16)
        if continues:  # what follows the mark is cut off; its space shows whether the template strips texts
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{mark} "}]
        given = {
            **_ABSENT,
            **variables,
            **({"tools": tools} if tools else {}),
            **self._template.globals,
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        deltas: list[str] = []
        num_chars = 0
        end = _DEADLINE_S.set(time.monotonic() + MAX_RENDER_S)
        try:
            for delta in self._template.generate(given):
                num_chars += len(delta)
                if num_chars > MAX_PROMPT_CHARS:
                    raise RequestError(
                        f"the chat makes a prompt of more than {MAX_PROMPT_CHARS} characters; send fewer messages",
                        param="messages",
                    )
                _check_time()
                deltas.append(delta)
        except _TemplateRejectionError as refusal:
            raise RequestError(f"the chat template refuses: {refusal!s:.500}", param="messages") from None
        except WeftError:
            raise
        except Exception as error:  # any defect of the template
            raise InternalError("the model's chat template failed") from error
        finally:
            _DEADLINE_S.reset(end)
        prompt, found, behind = "".join(deltas).rpartition(mark)
        if continues and not found:
            raise RequestError("the chat template leaves the last message out: it cannot go on", param="messages")
        return (prompt if behind.startswith(" ") else prompt.rstrip()) if continues else behind


class _TemplateRejectionError(Exception):
    """The template called ``raise_exception``, with a text."""


#: Deadline of the current rendering, by ``time.monotonic``.
_DEADLINE_S: ContextVar[float] = ContextVar("end_s")
_TIMED = "weft_timed"
#: Variables that Hugging Face's renderer always defines, so templates compare them with None.
_ABSENT = {"tools": None, "documents": None}


def _check_time() -> None:
    if time.monotonic() > _DEADLINE_S.get():
        raise RequestError(
            f"the chat template took more than {MAX_RENDER_S:g} s; send fewer messages", param="messages"
        )


def _time_limited(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


class _TimeLimitedEnvironment(ImmutableSandboxedEnvironment):  # type: ignore[misc]  # jinja2's types are not read
    """Checks the deadline on each call, so that recursive macros end."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object of the template."""
        _check_time()
        return super().call(context, obj, *args, **kwargs)


class _GenerationTag(Extension):  # type: ignore[misc]
    """``{% generation %}`` marks the assistant's output for training; without effect here."""

    tags = {"generation"}  # noqa: RUF012  # as the class above it has them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The enclosed nodes."""
        next(parser.stream)
        within: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return within


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    if len(source.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise InvalidArgumentError(f"a chat template may have {MAX_TEMPLATE_BYTES} bytes; this one has more")
    environment = _TimeLimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters |= {"tojson": _to_json, _TIMED: _time_limited}
    del environment.globals["lipsum"]  # could create text of any length in one call
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TIMED, [], [], None, None)
        code = environment.compile(tree)
        return environment.template_class.from_code(environment, code, environment.make_globals(None))
    except (jinja2.TemplateError, RecursionError, ValueError) as error:
        line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidArgumentError(f"the chat template cannot be compiled{line}: {error}") from None


def read_template(path: Path) -> str:
    """Read and validate a template file. Raises InvalidArgumentError, which names the file."""
    try:
        with path.open("rb") as file:
            source = file.read(MAX_TEMPLATE_BYTES + 1).decode()
        _compiled(source)
    except OSError as error:
        raise InvalidArgumentError(f"chat template {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"chat template {path} is not UTF-8") from None
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}") from None
    return source


def _raise_exception(text: object) -> NoReturn:
    raise _TemplateRejectionError(str(text))


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter; arguments as in Hugging Face's renderer."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
