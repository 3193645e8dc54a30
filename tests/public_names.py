"""The public names of ``weft``: their signatures as lines, and their docstrings as a page."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any, is_typeddict

import weft

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):( .+)?")
_ITEM = re.compile(r"(\**[\w, ]+?): (.*)")


def own_names() -> Iterator[tuple[str, Any]]:
    """Each name of ``weft.__all__`` with its object, those of one module together."""
    for names in weft._NAMES.values():
        for name in names.split():
            yield name, getattr(weft, name)


def signature_of(thing: Any) -> str:
    """Parameters with their kinds and defaults, without annotations, which versions of Python write differently."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    shown = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return re.sub(r"<(?:class|function) '?([\w.]+)'?[^>]*>", lambda match: match[1].rpartition(".")[2], shown)


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class of Weft defines, also in its bases."""
    names: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("weft")]):
        names |= vars(base)
    for name, value in names.items():
        is_member = callable(value) or isinstance(value, property | classmethod | staticmethod)
        if is_member and (not name.startswith("_") or name in ("__call__", "__getitem__")):
            yield name, getattr(kind, name) if isinstance(value, classmethod | staticmethod) else value


def lines_of(name: str, thing: Any) -> Iterator[str]:
    """What others depend on: the name, and everything that can be called or read at it."""
    if isinstance(thing, ModuleType):
        for member, value in vars(thing).items():
            if isinstance(value, type) and value.__module__ == thing.__name__ and not member.startswith("_"):
                yield f"class {name}.{member}{signature_of(value)}: {value.__base__.__name__}"
    elif is_typeddict(thing):
        yield f"{name}: {', '.join(thing.__annotations__)}"
    elif isinstance(thing, type):
        yield f"class {name}{signature_of(thing)}"
        for member, value in members_of(thing):
            is_field = isinstance(value, property)
            yield f"    {name}.{member}{'' if is_field else signature_of(value)}"
        if dataclasses.is_dataclass(thing):
            yield from (f"    {name}.{one.name}" for one in dataclasses.fields(thing) if not one.name.startswith("_"))
    elif callable(thing):
        yield f"{name}{signature_of(thing)}"
    else:
        yield f"{name}: {type(thing).__name__}"


def page() -> str:
    """``docs/python-reference.md``: each name with its signature and docstring."""
    parts = [
        "# The names of `import weft`\n\nMade of the docstrings by tests/unit/docs/test_python_reference.py. "
        "[python.md](python.md) is the guide.\n"
    ]
    for name, thing in own_names():
        doc = inspect.getdoc(thing) or ""
        if isinstance(thing, str):
            continue
        parts.append(f"\n## {name}\n\n")
        if callable(thing) and not is_typeddict(thing):
            parts.append(f"```text\nweft.{name}{signature_of(thing)}\n```\n\n")
        parts.append(_as_markdown(doc))
        if isinstance(thing, ModuleType):
            kinds = [one for one in vars(thing).values() if isinstance(one, type) and one.__module__ == thing.__name__]
            parts.append(
                "\n" + "".join(f"- `{one.__name__}`: {_first(one)}\n" for one in kinds if one.__name__[0] != "_")
            )
        elif isinstance(thing, type) and not is_typeddict(thing):
            members = [(one, value) for one, value in members_of(thing) if inspect.getdoc(value)]
            listed = (
                f"- `{one}{'' if isinstance(value, property) else signature_of(value)}`: {_first(value)}\n"
                for one, value in members
                if one not in ("__call__", "__getitem__") or value.__doc__
            )
            parts.append("\n" * bool(members) + "".join(listed))
    datatypes = ", ".join(f"`{name}`" for name, thing in own_names() if isinstance(thing, str))
    parts.append(f"\n## Datatypes\n\n{datatypes}\n")
    return "".join(parts)


def _first(thing: Any) -> str:
    return _plain((inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " "))


def _plain(text: str) -> str:
    return text.replace("``", "`")


def _as_markdown(doc: str) -> str:
    """A docstring in Google's style as Markdown: sections become lists, examples code."""
    blocks = []
    for block in doc.split("\n\n"):
        lines = block.splitlines()
        section = _SECTION.fullmatch(lines[0]) if lines else None
        if block.startswith(">>>"):
            blocks.append(f"```python\n{block}\n```")
        elif section is not None and not section[2]:
            items: list[str] = []
            for line in textwrap.dedent("\n".join(lines[1:])).splitlines():
                item = _ITEM.fullmatch(line)
                if line.startswith(" ") and items:
                    items[-1] += f" {line.strip()}"
                else:
                    items.append(f"- `{item[1]}`: {item[2]}" if item else f"- {line}")
            blocks.append(f"**{section[1]}**\n\n" + _plain("\n".join(items)))
        elif any(line.startswith("    ") for line in lines):
            blocks.append("```text\n" + block.replace("::\n", ":\n") + "\n```")
        else:
            blocks.append(_plain(re.sub("::$", ":", block)))
    return "\n\n".join(blocks) + "\n"
