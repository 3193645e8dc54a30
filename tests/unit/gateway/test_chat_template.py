"""Chat templates: what they may do, and what happens when they do more."""

import json
import random
import re
import time
from pathlib import Path

import pytest
from tests.case_files import table

from weft.base.errors import InvalidArgumentError
from weft.gateway.errors import RequestError
from weft.gateway.openai import chat
from weft.gateway.openai import chat_template as templates
from weft.gateway.openai.chat import ChatRequest
from weft.gateway.openai.chat_template import BREAK, ChatTemplate, breaker, read_template, special_texts
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import TextRequest
from weft.gateway.openai.tools.request import ToolUse
from weft_protos.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

MESSAGES = [{"role": "user", "content": "<hi> & ü"}]
TABLE = Path(__file__).with_name("templates.txt")


def render(source: str, **variables: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(MESSAGES, add_generation_prompt=True, variables=variables)


def test_blocks_leave_no_lines_behind() -> None:
    """Neither the lines of blocks nor what stands before them are in the prompt."""
    source = """{{ bos_token }}
{%- for message in messages %}
    {% if loop.index %}{{ message.role }}{% endif %}
|
{% endfor %}
{%- if add_generation_prompt %}x{% endif %}"""
    assert "<s>user|\nx" == render(source)


@pytest.mark.parametrize(("source", "prompt"), table(TABLE, "prompt"))
def test_a_template_does_what_those_of_models_do(source: str, prompt: str) -> None:
    """A template has the functions and marks that those of Hugging Face use, and a request's variables hide none."""
    source, variables = json.loads(source) if source.startswith("[") else (source, {})
    assert json.loads(prompt) == render(source, **variables)


@pytest.mark.parametrize(("given", "broken"), table(TABLE, "text"))
def test_special_tokens_of_users_are_text(given: str, broken: str) -> None:
    """Those of the template stay; in messages and variables they are broken by a character that nobody sees."""
    text, expected = json.loads(given), json.loads(broken)
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}|{{ notes[0].a }}<|x|>", {"bos_token": "<s>"}, ["[END]"]
    )
    messages, variables = [{"role": "user", "content": text}], {"notes": [{"a": text}, 1, None]}
    for has_special_tokens, each in ((False, expected), (True, text)):
        prompt = template.render(
            messages, add_generation_prompt=True, variables=variables, has_special_tokens=has_special_tokens
        )
        assert f"<s>{each}|{each}<|x|>" == prompt


async def test_tools_do_not_get_lost_on_the_way_to_another_engine() -> None:
    """A model that takes messages gets no tools with them, whatever its template says of them."""
    names = ("text_input", "messages")
    inputs = [ModelInput(name=name, data_type=DataType.TYPE_STRING, dims=[1], optional=True) for name in names]
    outputs = [ModelOutput(name="text_output", data_type=DataType.TYPE_STRING, dims=[-1])]
    model = TextModel.from_config(ModelConfig(name="m", input=inputs, output=outputs), "{{ tools }}")
    assert model is not None
    common = TextRequest("m", {}, False, False, {}, None)
    for use in (None, ToolUse([{}], {})):
        request = ChatRequest(common, MESSAGES, True, {}, False, use)
        if use is None:
            assert "None" == await chat.render(request, model)
        else:
            with pytest.raises(RequestError, match="its messages alone"):
                await chat.render(request, model)


def test_special_tokens_on_the_border_of_two_pieces_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is searched by pieces, between which other threads run; wherever a token lies it is broken once."""
    monkeypatch.setattr(templates, "_PIECE_CHARS", 7)
    tokens = ("<s>", "<s>s>", "[INST]", "<|x|>", "<|im_start|>")
    rng = random.Random(1)
    for _ in range(200):
        pieces = rng.choices((*tokens, "a", "<", "|>", "[IN", " "), k=20)
        text = "".join(pieces)
        pattern = re.compile(r"<s>s>|<s>|\[INST\]|<\|[^<>|\s]{1,64}\|>")
        assert pattern.sub(lambda found: found[0][0] + BREAK + found[0][1:], text) == breaker(tokens)(text)


def test_variables_that_are_nested_too_deeply_are_refused() -> None:
    """As deep as JSON may be, which is deeper than what is done with each text in it."""
    value: object = "x"
    for _ in range(5000):
        value = [value]
    with pytest.raises(RequestError, match="nested too deeply"):
        ChatTemplate("{{ messages[0].content }}", {}).render([], add_generation_prompt=True, variables={"a": value})


@pytest.mark.parametrize("listed", ["", "{", "3", "[1, null]", "[" * 100_000])
def test_list_of_special_tokens_that_is_none_is_empty(listed: str) -> None:
    """What a configuration says there may be anything."""
    assert ("<s>",) == special_texts(listed, ["<s>"])
    assert {"<s>", "</s>"} == set(special_texts('["</s>", 1]', ["<s>"]))


@pytest.mark.parametrize(("source", "words"), table(TABLE, "refused"))
def test_a_template_that_goes_on_or_refuses_is_the_clients_error(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own words are told as far as they are short; a prompt is bounded in length while it is made, and in time."""
    monkeypatch.setattr(templates, "MAX_RENDER_S", 0.05 if "took" in words else 60.0)
    start_s = time.monotonic()
    with pytest.raises(RequestError, match=words) as caught:
        render(source)
    assert len(caught.value.message) < 600
    assert ("messages", 400) == (caught.value.param, caught.value.http_status)
    assert time.monotonic() - start_s < 30


@pytest.mark.parametrize(
    ("content", "words"), [*table(TABLE, "file"), (json.dumps("{" * (1 << 20) + "{"), "this one has more")]
)
def test_a_template_that_is_none_is_found_at_the_start(tmp_path: Path, content: str, words: str) -> None:
    """The file is named, and the line."""
    path = tmp_path / "chat.jinja"
    path.write_text(json.loads(content), encoding="latin-1")
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        read_template(path)
    assert str(path) in caught.value.message


def test_a_template_is_read_from_its_file(tmp_path: Path) -> None:
    """As it stands there; without a file the error has the system's reason."""
    path = tmp_path / "chat.jinja"
    with pytest.raises(InvalidArgumentError, match="cannot be read: No such file"):
        read_template(path)
    path.write_text("{{ messages }}")
    assert "{{ messages }}" == read_template(path)
