"""Reasoning and tool calls in the text of answers; their formats by the templates of models."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases

from weft.base.errors import InternalError
from weft.gateway.errors import RequestError
from weft.gateway.openai.answer import REASONING_MARKS, AnswerForm, AnswerReader, message_of, reasoning_marks
from weft.gateway.openai.tools import FORMATS, format_of


def read(form: AnswerForm, pieces: Iterable[str]) -> dict[str, Any]:
    reader = AnswerReader(form)
    deltas = [delta for piece in pieces for delta in reader.read(piece)]
    message = message_of([*deltas, *reader.finish()])
    for call in message.get("tool_calls", ()):
        del call["id"]
    return message


def shown(message: Mapping[str, Any]) -> str:
    lines = [f"content {json.dumps(message['content'], ensure_ascii=False)}"]
    if "reasoning_content" in message:
        lines.insert(0, f"reasoning {json.dumps(message['reasoning_content'])}")
    calls = (call["function"] for call in message.get("tool_calls", ()))
    return "\n".join([*lines, *(f"{call['name']} {call['arguments']}" for call in calls)])


@cases(Path(__file__).with_name("tool_calls.txt"))
def test_an_answer_is_the_same_however_it_is_cut(case: Case) -> None:
    """In one piece, in any two or three, and in characters."""
    thinks = {name for name, _ in case.options} >= {"thinks"}
    form = AnswerForm(
        marks=REASONING_MARKS["think"] if thinks else None,
        is_reasoning=case.option("thinks") == "open",
        tools=FORMATS.get(case.option("format")),
        schemas=json.loads(case.option("schemas")),
    )
    text = case.text
    whole = read(form, [text])
    case.check(shown(whole))
    draw = random.Random(1)
    cuts = [(0, place) for place in range(len(text))]
    cuts += [tuple(sorted(draw.choices(range(len(text)), k=2))) for _ in range(200)]
    for first, second in cuts:
        assert whole == read(form, (text[:first], text[first:second], text[second:])), (first, second)
    assert whole == read(form, text)


def test_text_is_held_back_no_longer_than_it_may_begin_a_marker() -> None:
    """Content and arguments come as soon as it is known that they are some."""
    reader = AnswerReader(AnswerForm(tools=FORMATS["hermes"]))
    texts = ["a <to", "ol_box> <tool_call>", '{"name": "f", "argu', 'ments": {"a": "x', 'y"', "}}"]
    assert [
        ["a "],
        ["<tool_box> "],
        [],
        ["", '{"a": "x'],
        ['y"'],
        ["}"],
    ] == [
        [delta.get("content") or delta["tool_calls"][0]["function"]["arguments"] for delta in reader.read(text)]
        for text in texts
    ]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <function-name>', "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_xml"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ('{"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
    ],
)
def test_the_template_shows_the_format(template: str, name: str) -> None:
    """Unless the model's parameter names one; without either the client is told what to do."""
    assert name == format_of("m", "", template).name
    assert "pythonic" == format_of("m", "pythonic", template).name
    with pytest.raises(RequestError, match="the parameter 'tool_parser', one of qwen3_xml, hermes, mistral"):
        format_of("m", "", "{{ tools }}")
    with pytest.raises(InternalError, match="did you mean 'hermes'"):
        format_of("m", "herms", template)


def test_the_template_shows_the_marks_of_reasoning() -> None:
    """Unless the model's parameter names some, or none."""
    assert "<think>" == reasoning_marks("m", "", "a</think>").start
    assert "[THINK]" == reasoning_marks("m", "mistral", "a</think>").start
    harmony = reasoning_marks("m", "", "<|start|>assistant<|channel|>analysis<|message|>")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert {"reasoning_content": "Hm.", "content": "Yes."}.items() <= read(AnswerForm(harmony), text).items()
    assert reasoning_marks("m", "none", "a</think>") is None
    assert reasoning_marks("m", "", "a") is None
    with pytest.raises(InternalError, match="did you mean 'think'"):
        reasoning_marks("m", "thinks", "")


#: Of these texts are made that no model has written.
PARTS = [
    "<tool_call>", "</tool_call>", "<function=", "f>", "f", "<parameter=a>", "</parameter>", "</function>",
    "{", "}", "[", "]", "(", ")", ", ", ":", "; ", '"', "'", "\\", '"name": "f"', '"arguments": ', '"parameters": {}',
    "a=1", "\\ud800", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|start|>",
    "<|channel|>", "analysis", " to=functions.f", "<|message|>", "<|end|>", "<think>", "</think>", " ", "\n", "ü",
    "null", "NaN", "1e999", '{"name": "f", "arguments": {',
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_breaks_a_reader(name: str) -> None:
    """Whatever a model writes is a message that can be sent, however it is cut."""
    draw = random.Random(2)
    for number in range(300):
        marks = REASONING_MARKS["think"] if number % 2 else None
        form = AnswerForm(marks, is_reasoning=number % 4 == 3, tools=FORMATS[name])
        pieces = draw.choices(PARTS, k=draw.randint(1, 24))
        whole = read(form, ["".join(pieces)])
        assert whole == read(form, pieces) == read(form, "".join(pieces)), pieces
        json.dumps(whole, ensure_ascii=False).encode()
