"""``docs/openai.md`` has the fields that the endpoints read; ``WEFT_UPDATE_GOLDEN=1`` writes them."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from weft.gateway.openai import ENDPOINTS
from weft.gateway.openai.fields import Field

GUIDE = Path(__file__).parents[3] / "docs" / "openai.md"
_BEGIN = re.compile(r"(<!-- fields: [^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _flat(fields: Iterable[Field]) -> Iterator[Field]:
    for row in fields:
        yield replace(row, fields=())
        yield from _flat(replace(one, name=f"{row.name}.{one.name}") for one in row.fields)


def _tables() -> str:
    """A table of the supported fields, one of those that are refused, and a list of those without effect."""
    found: dict[tuple[str, str, str, str, str], dict[str, None]] = {}
    for endpoint in ENDPOINTS:
        for row in _flat(endpoint.fields):
            key = (row.support, row.name, row.type, row.default, row.effect)
            name = endpoint.path.removeprefix("/").removeprefix("v1/").removeprefix("v2/")
            found.setdefault(key, {})[name] = None
    num_endpoints = max(map(len, found.values()))  # every one has 'model'
    supported = ["| field | of | type | default | effect |", "|---|---|---|---|---|"]
    refused = ["| unsupported field | of | instead |", "|---|---|---|"]
    names = []
    for (support, name, kind, default, effect), paths in found.items():
        where = ", ".join(paths) if len(paths) < num_endpoints else "all"
        if support == "yes":
            supported.append(f"| `{name}` | {where} | {kind} | {default} | {effect} |")
        elif support == "no":
            refused.append(f"| `{name}` | {where} | {effect} |")
        else:
            names.append(f"`{name}`")
    return "\n".join([*supported, "", *refused, "", f"Without effect: {', '.join(dict.fromkeys(names))}.", ""])


def test_the_fields_are_those_that_are_read() -> None:
    """The table of the page is that of the endpoints."""
    text, tables = GUIDE.read_text(), _tables()
    (written,) = (match[2] for match in _BEGIN.finditer(text))
    if written != tables and os.environ.get("WEFT_UPDATE_GOLDEN"):
        GUIDE.write_text(_BEGIN.sub(lambda match: match[1] + tables + match[3], text))
    assert tables == written
