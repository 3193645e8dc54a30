"""``weft stubs``: the types of models and graphs, for mypy, pyright and editors."""

from collections.abc import Iterable
from keyword import iskeyword

from weft.authoring.steps import STEP_FIELDS, Step
from weft.base.signature import ModelSignature, TensorSpec
from weft.v2.client.aio import CallOptions
from weft.v2.client.answer import Answer
from weft.v2.client.connect import Client

_HEADER = '''\
"""The models and graphs of {source}, for type checkers and editors. Written by weft stubs; not to be edited.

    m: Models = weft.models(...)
    client: Client = weft.connect(...)              # or AsyncClient, of weft.connect_async
"""
# ruff: noqa
# mypy: disable-error-code="empty-body, misc"

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, Protocol, Self, TypedDict, Unpack

import weft
from numpy.typing import ArrayLike, NDArray
from weft.authoring.steps import Step
from weft.authoring.tracing import Symbol


class StepFields(TypedDict, total=False):
    """Fields of a step, and of its policy."""

{fields}
'''
_PART = '''

class _{name}_Step(Step):
    __getattr__: None  # type: ignore
{symbols}

class _{name}_Target(Protocol):
    def __call__(self{places}, **fields: Unpack[StepFields]) -> _{name}_Step:
        """{signature}"""


class _{name}_Answer(weft.Answer):
    __getattr__: None  # type: ignore
{arrays}
'''
_CALLS = '''

class _{name}{suffix}(Protocol):
    {word}def __call__(self{keywords}, **options: Unpack[weft.CallOptions]) -> _{name}_Answer:
        """{signature}"""

    def stream(
        self{keywords}, **options: Unpack[weft.CallOptions]
    ) -> {generator}[_{name}_Answer, None{rest}]:
        """{signature}"""
'''
_MODELS = '''

class Models(Protocol):
    """Calls them in a graph."""

    def __getitem__(self, name: str) -> Any: ...
'''
_CLIENT = '''

class {kind}(Protocol):
    """Calls them on a server."""

    {word}def __{a}enter__(self) -> Self: ...
    {word}def __{a}exit__(self, *_: object) -> None: ...
    {word}def close(self) -> None: ...
    {word}def names(self) -> list[str]: ...
    def __getitem__(self, name: str | tuple[str, str | int]) -> Any: ...
'''


def stubs_text(signatures: Iterable[ModelSignature], source: str) -> str:
    """Content of ``models.pyi``, which is a module of Python too.

    Names are left out that are no identifiers, or that a client, step or answer has itself: those are read as items.

    Args:
        source: Where the signatures are from, for the header.
    """
    known = [one for one in signatures if one.name.isidentifier() and not iskeyword(one.name)]
    fields = "\n".join(f"    {name}: Any" for name in sorted(STEP_FIELDS) if not iskeyword(name))
    parts = [_HEADER.format(source=source, fields=fields), *map(_part, known)]
    parts.append(_MODELS)
    parts += (_property(one.name, f"_{one.name}_Target") for one in known)
    for kind, suffix, word, a in (("Client", "", "", ""), ("AsyncClient", "_Async", "async ", "a")):
        parts.append(_CLIENT.format(kind=kind, word=word, a=a))
        parts += (_property(one.name, f"_{one.name}{suffix}") for one in known if not hasattr(Client, one.name))
    return "".join(parts)


def _part(model: ModelSignature) -> str:
    places = [f", {name}: Any = ..." for name in _names(model.inputs) if name not in STEP_FIELDS]
    keywords = [
        f", {spec.name}: ArrayLike{' | None = ...' * spec.is_optional}"
        for spec in sorted(model.inputs, key=lambda spec: spec.is_optional)
        if spec.name in _names([spec]) and spec.name not in CallOptions.__annotations__
    ]

    def described(specs: Iterable[TensorSpec]) -> str:
        shown = ", ".join(f"{spec.name} {spec.datatype}{list(model.full_shape(spec))}" for spec in specs)
        return shown.replace("\\", "?").replace('"', "?")

    texts = {
        "name": model.name,
        "symbols": "".join(f"    {name}: Symbol\n" for name in _names(model.outputs) if not hasattr(Step, name)),
        "arrays": "".join(f"    {name}: NDArray[Any]\n" for name in _names(model.outputs) if not hasattr(Answer, name)),
        "places": "".join(places),
        "keywords": ", *" * bool(keywords) + "".join(keywords),
        "signature": f"{described(model.inputs)} -> {described(model.outputs)}",
    }
    blocking = _CALLS.format(**texts, suffix="", word="", generator="Generator", rest=", None")
    awaited = _CALLS.format(**texts, suffix="_Async", word="async ", generator="AsyncGenerator", rest="")
    return _PART.format(**texts) + blocking + awaited


def _names(specs: Iterable[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs if spec.name.isidentifier() and not iskeyword(spec.name)]


def _property(name: str, kind: str) -> str:
    return f"    @property\n    def {name}(self) -> {kind}: ...\n"
