"""Bodies, arguments and templates that are refused: what is said, by ``refused.txt``."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from tests.case_files import says, table

from weft.base.errors import InternalError, InvalidArgumentError
from weft.gateway.errors import RequestError
from weft.gateway.json_text import parse_json
from weft.gateway.main import fault_of, make_parser
from weft.gateway.openai import chat, completions
from weft.gateway.openai.chat_template import ChatTemplate
from weft.gateway.v2 import routes
from weft.gateway.v2.request import bytes_of, generate_request, parse_head
from weft_protos import grpc_service_pb2 as pb

USER = [{"role": "user", "content": "hi"}]


def _data(text: str) -> object:
    data, datatype = text.rsplit(" ", 1)
    return bytes_of(json.loads(data), datatype, "x")


def _generate(text: str) -> object:
    metadata = pb.ModelMetadataResponse(name="m")
    metadata.inputs.add(name="text_input", datatype="BYTES", shape=[-1, 1])
    metadata.inputs.add(name="open", datatype="INT32", shape=[-1, -1, -1])
    return generate_request(text.encode(), metadata.SerializeToString(), "")


def _completions(fields: dict[str, Any]) -> object:
    body = json.dumps({"model": "m", "prompt": "p"} | fields).encode()
    return completions.ENDPOINT.read(body, Headers(), is_strict=True)


#: What is done with a row's text, by its heading.
_READ: dict[str, list[Callable[[str], object]]] = {
    "data": [_data],
    "infer": [lambda text: parse_head(text.encode(), "m", "").request([])],
    "generate": [_generate],
    "settings of traces and logs": [
        lambda text: routes.trace_request("", json.loads(text)),
        lambda text: routes.log_request("", json.loads(text)),
    ],
    "load": [lambda text: routes.load_request("m", json.loads(text))],
    "JSON": [lambda text: parse_json(text.encode())],
    "a template": [lambda text: ChatTemplate(text, {}).render(USER, add_generation_prompt=True, variables={})],
}
_ROWS = table(Path(__file__).with_name("refused.txt"))


@pytest.mark.parametrize(("kind", "text", "words"), [row for row in _ROWS if row.values[0] in _READ])
def test_what_does_not_fit_is_refused(kind: str, text: str, words: str) -> None:
    """With the field, what was got and what is taken; the message can be sent back whatever was in the text."""
    for read in _READ[kind]:
        with pytest.raises((InvalidArgumentError, InternalError)) as caught:
            read(text)
        assert says(words, caught.value.message), caught.value.message
        caught.value.message.encode()
        assert isinstance(caught.value, InternalError) == (kind == "a template")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *((json.loads(str(row.values[1])), row.values[2]) for row in _ROWS if row.values[0] == "completions"),
        ({"stop": "x" * 1025}, "stop"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"speculation": "x" * 65}, "speculation"),
    ],
    ids=str,
)
def test_the_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    """So that a program can point at it."""
    with pytest.raises(RequestError) as caught:
        _completions(fields)
    assert param == caught.value.param


def test_variables_of_a_template_are_text() -> None:
    """At any depth; else the prompt could not be sent."""
    body = {"model": "m", "messages": USER, "chat_template_kwargs": {"a": ["\ud800"]}}
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        chat.ENDPOINT.read(json.dumps(body).encode(), Headers())
    assert "chat_template_kwargs" == caught.value.param


@pytest.mark.parametrize(("name", "shown"), [("a" * 1000 + "\\udfff", "the field 'a{80}', with half")])
def test_a_long_name_is_shown_by_its_beginning(name: str, shown: str) -> None:
    """Of a field that cannot be sent back."""
    with pytest.raises(RequestError, match=shown):
        parse_json(f'{{"{name}": 1}}'.encode())


@pytest.mark.parametrize(("kind", "text", "words"), [row for row in _ROWS if row.values[0] in ("arguments", "usage")])
def test_arguments_that_do_not_fit_are_told_of(
    kind: str, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started; those that are none are wrong usage, with exit status 2."""
    arguments = ["--router", "r:1", *shlex.split(text)]
    assert "" == fault_of(make_parser().parse_args(arguments[:2]))
    if kind == "arguments":
        assert words in fault_of(make_parser().parse_args(arguments))
        return
    with pytest.raises(SystemExit, match="2"):
        make_parser().parse_args(arguments)
    assert words in capsys.readouterr().err
