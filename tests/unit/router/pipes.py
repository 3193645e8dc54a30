"""Versions of a graph that are told apart by the name of their first step."""

from typing import Any

from tests.unit.router import make

from weft.base.core import CallContext


def named(step: str, **replacements: str) -> str:
    """The pipe with another first step; quoted names may be replaced."""
    text = make.PIPE.replace('name: "one"', f'name: "{step}"')
    for old, new in replacements.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    return text


async def answered_by(core: Any, version: str = "") -> str:
    """First step and version of the graph that answers."""
    context = CallContext()
    result = await core.infer(make.request(version=version), context)
    path = dict(context.trailing_metadata)["x-graph-path"]
    return f"{path.removeprefix('root.').partition(';')[0]}/{result.model_version}"
