"""``docs/openai.md`` and ``docs/agents.md`` have the fields that are read; ``WEFT_UPDATE_GOLDEN=1`` writes them."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from weft.gateway.main import ENDPOINTS
from weft.gateway.openai.endpoint import Endpoint
from weft.gateway.openai.fields import Field

DOCS = Path(__file__).parents[3] / "docs"
_OF_AGENTS = ("/v1/responses", "/v1/messages")
_BEGIN = re.compile(r"(<!-- fields: [^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _flat(fields: Iterable[Field]) -> Iterator[Field]:
    for row in fields:
        yield replace(row, fields=())
        yield from _flat(replace(one, name=f"{row.name}.{one.name}") for one in row.fields)


def _tables(endpoints: Sequence[Endpoint]) -> str:
    """A table of the supported fields, one of those that are refused, and a list of those without effect."""
    found: dict[tuple[str, str, str, str, str], dict[str, None]] = {}
    for endpoint in endpoints:
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


@pytest.mark.parametrize("page", ["openai.md", "agents.md"])
def test_the_fields_are_those_that_are_read(page: str) -> None:
    """The table of a page is that of its endpoints."""
    is_of_agents = page == "agents.md"
    endpoints = [one for one in ENDPOINTS if one.path.startswith(_OF_AGENTS) == is_of_agents]
    guide = DOCS / page
    text, tables = guide.read_text(), _tables(endpoints)
    (written,) = (match[2] for match in _BEGIN.finditer(text))
    if written != tables and os.environ.get("WEFT_UPDATE_GOLDEN"):
        guide.write_text(_BEGIN.sub(lambda match: match[1] + tables + match[3], text))
    assert tables == written
