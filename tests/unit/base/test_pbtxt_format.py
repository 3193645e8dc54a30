"""The layout of text format: in files beside this one, and its laws for every file and any spacing."""

import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.case_files import Case, cases

from weft.base.text.pbtxt_format import format_pbtxt
from weft.base.text.pbtxt_scan import TOKEN
from weft_protos.graph_pb2 import Graph
from weft_protos.model_config_pb2 import ModelConfig

ROOT = Path(__file__).parents[3]
COMMENT = re.compile(r"#[^\n]*")
SPACES = st.sampled_from([" ", "  ", "\n", "\n\n\n", "\t", " # why\n", "\n# {\n\n", "\r\n"])


def parsed(text: str) -> Graph | ModelConfig | None:
    """The message of a text, of either type; None if it is of neither."""
    for kind in (Graph, ModelConfig):
        try:
            return text_format.Parse(text, kind())
        except text_format.ParseError:
            continue
    return None


SAMPLES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("model_repository", "tests")
    for path in sorted((ROOT / folder).rglob("*.pbtxt"))
    if parsed(path.read_text()) is not None
}


def check_laws(text: str) -> None:
    """Assert that the layout changes neither message nor comments, and once it is there nothing at all."""
    formatted = format_pbtxt(text)
    assert parsed(text) == parsed(formatted)
    comments = ([word for word in map(str.strip, tokens(one)) if word[:1] == "#"] for one in (text, formatted))
    assert next(comments) == next(comments)
    assert formatted == format_pbtxt(formatted)
    assert all(line == line.rstrip() for line in formatted.split("\n"))


def tokens(text: str) -> list[str]:
    """Tokens and comments."""
    return [match[0] for match in TOKEN.finditer(text) if match[0].strip()]


@cases(Path(__file__).with_name("pbtxt_format.txt"))
def test_layout(case: Case) -> None:
    """A text is laid out as the case says."""
    check_laws(case.text)
    case.check(format_pbtxt(case.text).removesuffix("\n"))


@pytest.mark.parametrize("name", [name for name in SAMPLES if name.startswith("model_repository")])
def test_the_samples_are_laid_out(name: str) -> None:
    """They are what the layout makes of them."""
    assert SAMPLES[name] == format_pbtxt(SAMPLES[name])


def test_laws_of_all_files() -> None:
    """They hold for every graph and configuration of the checkout."""
    assert len(SAMPLES) > 200
    for text in SAMPLES.values():
        check_laws(text)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_laws_of_any_spacing(data: st.DataObject) -> None:
    """They hold wherever lines are broken, and wherever comments stand."""
    words = tokens(COMMENT.sub("", data.draw(st.sampled_from([text for text in SAMPLES.values() if "#" not in text]))))
    spaces = data.draw(st.lists(SPACES, min_size=len(words), max_size=len(words)))
    check_laws("".join(word + space for word, space in zip(words, spaces, strict=True)))
