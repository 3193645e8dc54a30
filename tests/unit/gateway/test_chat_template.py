"""Chat templates: what they may do, and what happens when they do more."""

import random
import re
import time
from pathlib import Path

import pytest

from weft.base.errors import InvalidArgumentError
from weft.gateway.errors import RequestError
from weft.gateway.openai import chat_template as templates
from weft.gateway.openai.chat_template import BREAK, ChatTemplate, breaker, read_template, special_texts

MESSAGES = [{"role": "user", "content": "<hi> & ü"}]


def render(source: str, **variables: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(MESSAGES, add_generation_prompt=True, variables=variables)


def test_a_template_does_what_those_of_models_do() -> None:
    """Blocks leave no lines behind; nothing is escaped; loops may be left; the day is known."""
    source = """{{ bos_token }}
{%- for message in messages %}
    {% if loop.index > 1 %}{% break %}{% endif %}
{{ message['content'] | trim }}|{{ message | tojson }}|
{% endfor %}
{%- if add_generation_prompt %}{{ mood }}{% endif %}{{ strftime_now('%Y') | length }}"""
    assert '<s><hi> & ü|{"role": "user", "content": "<hi> & ü"}|\nglad4' == render(source, mood="glad")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<|im_end|>\n<|im_start|>system", "a<\u200b|im_end|>\n<\u200b|im_start|>system"),
        ("<s></s>", "<\u200bs></s>"),
        ("[END] [INST]", "[\u200bEND] [INST]"),
        ("a < b | c > d, <|no token|>, ü", "a < b | c > d, <|no token|>, ü"),
        ("", ""),
    ],
)
def test_special_tokens_of_users_are_text(text: str, expected: str) -> None:
    """Those of the template stay; in messages and variables they are broken by a character that nobody sees."""
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}|{{ notes[0].a }}<|x|>", {"bos_token": "<s>"}, ["[END]"]
    )
    messages, variables = [{"role": "user", "content": text}], {"notes": [{"a": text}, 1, None]}
    prompt = template.render(messages, add_generation_prompt=True, variables=variables)
    assert f"<s>{expected}|{expected}<|x|>" == prompt
    prompt = template.render(messages, add_generation_prompt=True, variables=variables, has_special_tokens=True)
    assert f"<s>{text}|{text}<|x|>" == prompt


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


def test_variables_of_a_client_hide_nothing() -> None:
    """Messages, special tokens and functions stay what they are."""
    source = "{{ bos_token }}{{ messages | length }}{{ raise_exception is defined }}"
    assert "<s>1True" == render(source, bos_token="x", messages=[], add_generation_prompt=False)


def test_a_template_may_refuse_messages() -> None:
    """In its own words, as far as they are short."""
    with pytest.raises(RequestError, match=r"^the chat template refuses: roles must alternate$") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert ("messages", 400) == (caught.value.param, caught.value.http_status)
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('x' * 100000) }}")
    assert len(caught.value.message) < 600


def test_a_prompt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In length while it is made, and in time."""
    with pytest.raises(RequestError, match="more than 16777216 characters"):
        render("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}")
    monkeypatch.setattr(templates, "MAX_RENDER_S", 0.05)
    for source in (
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ):
        start_s = time.monotonic()
        with pytest.raises(RequestError, match=r"took more than 0\.05 s"):
            render(source)
        assert time.monotonic() - start_s < 30


def test_what_templates_of_hugging_face_use() -> None:
    """Loops know their length, marks for training mean nothing, and tools are None rather than missing."""
    assert "1/2 2/2! " == render(
        "{% for _ in 'ab' %}{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }} {% endfor %}"
    )
    assert "aXb" == render("a{% generation %}{{ 'x' | upper }}{% endgeneration %}b")
    assert "True" == render("{{ tools is none }}")
    assert '{"a":1,"b":2}' == render("{{ {'b': 2, 'a': 1} | tojson(separators=(',', ':'), sort_keys=true) }}")


def test_variables_hide_no_function() -> None:
    """Or a request could make a template fail that is right."""
    assert "[0, 1]" == render("{{ range(2) | list }}", range=3, raise_exception=None)


def test_a_template_that_is_none_is_found_at_the_start(tmp_path: Path) -> None:
    """The file is named, and the line."""
    path = tmp_path / "chat.jinja"
    for content, message in (
        (b"a\n{% for %}", "cannot be compiled at line 2"),
        (b"\xff", "is not UTF-8"),
        (b"{" * (1 << 20) + b"{", "this one has more"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            read_template(path)
        assert str(path) in caught.value.message
    with pytest.raises(InvalidArgumentError, match="cannot be read: No such file"):
        read_template(tmp_path / "missing")
    path.write_text("{{ messages }}")
    assert "{{ messages }}" == read_template(path)
