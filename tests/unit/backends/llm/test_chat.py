"""What a Hugging Face folder says of chats, in each way that folders say it."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.backends.llm import tensors
from weft.backends.llm.tensors import chat_parameters
from weft.base.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"chat_template": "t", "bos_token": "<s>"}, {"chat_template": "t", "bos_token": "<s>"}),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}, {"bos_token": "<s>"}),
        (
            {"chat_template": [{"name": "tool_use", "template": "u"}, {"name": "default", "template": "d"}]},
            {"chat_template": "d"},
        ),
        ({"chat_template": [{"name": "tool_use", "template": "u"}], "unk_token": 7}, {}),
    ],
)
def test_the_tokenizers_configuration_says_it(tmp_path: Path, config: Any, expected: dict[str, str]) -> None:
    """A token is a text or an object with one; of several templates the default counts."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert expected == chat_parameters(tmp_path)


def test_a_file_of_its_own_wins_over_it(tmp_path: Path) -> None:
    """And without any file nothing is said."""
    assert {} == chat_parameters(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new ü", encoding="utf-8")
    assert {"chat_template": "new ü"} == chat_parameters(tmp_path)


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([{"content": "<s>", "special": True}, {"content": "<t>", "special": False}], {"special_tokens": '["<s>"]'}),
        ([{"special": True}, 3], {}),
        (None, {}),
    ],
)
def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path, added: Any, expected: dict[str, str]) -> None:
    """All of them, for who keeps them out of what users write."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert expected == chat_parameters(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Rather than served without its template."""
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"tokenizer_config\.json"):
        chat_parameters(tmp_path)


def test_the_configuration_of_the_model_wins_over_the_folder(tmp_path: Path) -> None:
    """What its `config.pbtxt` says stays, and the rest is added."""
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old", "bos_token": "<s>"}')
    own = {"chat_template": {"string_value": "own"}, "num_blocks": {"string_value": "8"}}
    completed = tensors.complete({"name": "m", "parameters": own}, tmp_path)
    assert own | {"bos_token": {"string_value": "<s>"}} == completed["parameters"]
