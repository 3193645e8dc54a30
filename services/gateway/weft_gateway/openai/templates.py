"""Chat templates: from messages to one prompt, by the model's own Jinja template in a sandbox.

A template is part of the model repository and trusted as that is; the messages are not, and the sandbox keeps what a
template does with them to values, without attributes of Python objects, imports or changes.
"""

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from weft_common.errors import InternalError, InvalidArgumentError, WeftError
from weft_gateway.errors import RequestError

#: Longest prompt that a template may make, in characters.
MAX_PROMPT_CHARS = 16 << 20
#: How long it may take, in seconds, looked at with each piece that it writes, each round of a loop and each call.
MAX_RENDER_S = 5.0
MAX_TEMPLATE_BYTES = 1 << 20


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja, as Hugging Face's ``tokenizer_config.json`` has it.
        special_tokens: Texts of ``bos_token``, ``eos_token`` and others that the template may name.

    Raises:
        InvalidArgumentError: It is no template, or too long.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compiled(source)
        self._special_tokens = special_tokens
        #: Elsewhere OpenAI's role for instructions is the older name of it.
        self.knows_developer = "developer" in source

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The prompt; takes as long as the template does, so call it on a thread.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: Whether the prompt ends where the assistant's answer begins.
            variables: More of what the template may look at; they hide nothing of the above, and no function.

        Raises:
            RequestError: The template refuses the messages, with its own words, or the prompt becomes too long.
            InternalError: It fails; how is its cause.
        """
        given = {
            **_ABSENT,
            **variables,
            **self._template.globals,
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        end = _END_S.set(time.monotonic() + MAX_RENDER_S)
        try:
            for piece in self._template.generate(given):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise RequestError(
                        f"the chat makes a prompt of more than {MAX_PROMPT_CHARS} characters; send fewer messages",
                        param="messages",
                    )
                _check_time()
                pieces.append(piece)
        except _RefusedByTemplateError as refusal:
            raise RequestError(f"the chat template refuses: {refusal.text[:500]}", param="messages") from None
        except WeftError:
            raise
        except Exception as error:  # whatever a template may get wrong
            raise InternalError("the model's chat template failed") from error
        finally:
            _END_S.reset(end)
        return "".join(pieces)


class _RefusedByTemplateError(Exception):
    """A template called ``raise_exception``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


#: When the template that is being rendered has no time left, on the clock of ``time.monotonic``.
_END_S: ContextVar[float] = ContextVar("end_s")
_TIMED = "weft_timed"
#: What Hugging Face's own renderer always gives, so that templates ask for None and not whether it is there.
_ABSENT = {"tools": None, "documents": None}


def _check_time() -> None:
    """Raises RequestError when the time is over."""
    if time.monotonic() > _END_S.get():
        raise RequestError(
            f"the chat template took more than {MAX_RENDER_S:g} s; send fewer messages", param="messages"
        )


def _timed(items: Iterable[Any]) -> Iterator[Any]:
    """The same, as long as there is time: a loop that writes nothing ends too."""
    for item in items:
        _check_time()
        yield item


class _TimedEnvironment(ImmutableSandboxedEnvironment):  # type: ignore[misc]  # jinja2's types are not read
    """Macros that call themselves end in time."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template."""
        _check_time()
        return super().call(context, obj, *args, **kwargs)


class _Generation(Extension):  # type: ignore[misc]
    """``{% generation %}`` marks what the assistant said, for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  # as the class above it has them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes within."""
        next(parser.stream)
        within: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return within


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """The template. Raises InvalidArgumentError."""
    if len(source.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise InvalidArgumentError(f"a chat template may have {MAX_TEMPLATE_BYTES} bytes; this one has more")
    environment = _TimedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters |= {"tojson": _to_json, _TIMED: _timed}
    del environment.globals["lipsum"]  # makes text of any length in one call
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
    """Source of a template in a file, checked. Raises InvalidArgumentError, which names the file."""
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
    raise _RefusedByTemplateError(str(text))


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
    """Without the escapes for HTML that Jinja's own filter makes; arguments as Hugging Face's templates give them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
