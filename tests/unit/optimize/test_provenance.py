"""The note on a version's origin in config.pbtxt."""

import json

import pytest

from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import parse
from weft.optimize.publishing import needed_parameters, noted_versions, with_provenance
from weft_protos.model_config_pb2 import ModelConfig

CONFIG = """# A comment that stays.
name: "m"   # and this one
parameters { key: "a" value { string_value: "1" } }"""
FACTS = {"method": "int8-dynamic", "notes": '3 x "MatMul" -> int8\\n; it\'s\nso', "loss": 0.1, "ratio": {"1": 0.5}}


def read(text: str) -> ModelConfig:
    """The configuration in a text."""
    return parse(text, ModelConfig(), file="config.pbtxt")[0]


@pytest.mark.parametrize("text", [CONFIG, CONFIG + "\n", CONFIG.replace("\n", "\r\n"), "", "# only a comment"])
def test_what_was_there_stays(text: str) -> None:
    """Character by character; the note is at the end, and is JSON with quotes and line breaks in it."""
    edited = with_provenance(text, 2, "from version 1\nby x", FACTS, {"b": "it's"})
    assert edited.startswith(text)
    config = read(edited)
    assert FACTS == json.loads(config.parameters["provenance_of_version_2"].string_value)
    assert "it's" == config.parameters["b"].string_value
    assert [2] == noted_versions(config)
    assert ("\r\n" in text) == ("\r\n" in edited)


def test_notes_on_several_versions_stand_beside_each_other() -> None:
    """Each with its own number."""
    edited = with_provenance(with_provenance(CONFIG, 2, "x", FACTS, {}), 13, "y", FACTS, {})
    assert {2, 13} == set(noted_versions(read(edited)))


def test_a_text_that_an_addition_would_change_is_refused() -> None:
    """A note of that version, which the new one would hide."""
    edited = with_provenance(CONFIG, 2, "x", FACTS, {})
    with pytest.raises(InvalidArgumentError, match="cannot be extended"):
        with_provenance(edited, 2, "x", FACTS | {"loss": 0.2}, {})


def test_a_parameter_with_another_value_is_refused() -> None:
    """It holds for all versions; the same value is there already, and a new one is to be added."""
    config = read(CONFIG)
    assert {"b": "2"} == needed_parameters(config, {"a": "1", "b": "2"})
    with pytest.raises(InvalidArgumentError, match=r"needs the parameter a: '2', and config\.pbtxt has '1'"):
        needed_parameters(config, {"a": "2"})
