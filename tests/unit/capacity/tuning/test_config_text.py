"""Changes of single fields in the text of a configuration."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tests.case_files import table

from weft.base.errors import UnsupportedError
from weft.capacity.tuning.config_text import Edit, edited, with_head
from weft_protos.model_config_pb2 import ModelConfig

CONFIG = """\
# An encoder.
name: "encoder"
backend: "onnxruntime"
max_batch_size: 32  # what the network takes
input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
parameters { key: "threads" value { string_value: "1" } }  # one is enough
parameters {
  key: "buckets"
  value { string_value: "8,16" }
}
dynamic_batching {
  # who waits
  preferred_batch_size: [ 4, 8 ]
  priority_levels: 3
}
"""

DELAY = ("dynamic_batching", "max_queue_delay_microseconds")


def lines_changed(text: str, new: str) -> tuple[set[str], set[str]]:
    """Lines that only the old text has, and those that only the new one has."""
    return set(text.splitlines()) - set(new.splitlines()), set(new.splitlines()) - set(text.splitlines())


@pytest.mark.parametrize(("change", "lines"), table(Path(__file__).with_name("config_text.txt"), "edit"))
def test_one_line_changes(change: str, lines: str) -> None:
    """All other lines, and the comment beside the field, stay."""
    path, _, value = change.partition(" ")
    old, new = (line.rstrip("-") for line in lines.split(" => "))
    written = edited(CONFIG, [Edit(tuple(path.split(".")), None if value == "none" else value)], file="f")
    removed, added = lines_changed(CONFIG, written)
    assert ({old} - {""}, {new} - {""}) == ({line.strip() for line in removed}, {line.strip() for line in added})


def test_message_goes_as_a_whole() -> None:
    """With its fields and the comments in it, and nothing else."""
    new = edited(CONFIG, [Edit(("dynamic_batching",), None)], file="f")
    assert CONFIG.startswith(new)
    assert "who waits" not in new


def test_field_of_a_missing_message_brings_it() -> None:
    """A model that does not batch gets ``dynamic_batching`` with the delay; a message on one line stays on one line."""
    bare = 'name: "m"'
    once = edited(bare, [Edit(("dynamic_batching",), "{ }"), Edit(DELAY, "100")], file="f")
    assert once == 'name: "m"\ndynamic_batching { max_queue_delay_microseconds: 100 }\n'
    assert edited(bare, [Edit(("instance_group", "count"), "3")], file="f").endswith("instance_group { count: 3 }\n")


@pytest.mark.parametrize(
    "text",
    [
        "dynamic_batching { preferred_batch_size: 4, preferred_batch_size: 8 }",
        "dynamic_batching < preferred_batch_size: [ 4, 8 ]; max_queue_delay_microseconds: 9 >",
        "dynamic_batching: { preferred_batch_size: 4 # four\n preferred_batch_size: [ ] }",
    ],
)
def test_every_way_to_write_a_list(text: str) -> None:
    """Repeated, in brackets, in angle brackets, with commas, semicolons and comments."""
    edits = [Edit(("dynamic_batching", "preferred_batch_size"), "[ 16, 32 ]"), Edit(DELAY, "7")]
    config = text_format.Parse(edited(text, edits, file="f"), ModelConfig())
    assert list(config.dynamic_batching.preferred_batch_size) == [16, 32]
    assert config.dynamic_batching.max_queue_delay_microseconds == 7


@pytest.mark.parametrize("value", ["2", None])
def test_parameters_in_one_list(value: str | None) -> None:
    """The entry is found among others, whichever it is, and its neighbours stay."""
    for key in ("a", "b", "c"):
        entries = ", ".join(f"{{ key: '{name}' value {{ string_value: '1' }} }}" for name in "abc")
        config = text_format.Parse(
            edited(f"parameters [ {entries} ]", [Edit(("parameters", key), value)], file="f"), ModelConfig()
        )
        got = {name: entry.string_value for name, entry in config.parameters.items()}
        assert got == {name: "1" for name in "abc" if name != key} | ({key: value} if value else {})


def test_head_is_replaced_by_the_next() -> None:
    """A file that is tuned twice has one line of provenance."""
    once = with_head(CONFIG, "weft tune: ", "first")
    assert once == "# weft tune: first\n" + CONFIG
    assert with_head(once, "weft tune: ", "second") == "# weft tune: second\n" + CONFIG


def test_an_editor_of_windows_wrote_it() -> None:
    """Lines keep their breaks, a removed one leaves no empty one, and a byte order mark goes."""
    text = 'name: "a"\r\nmax_batch_size: 3\r\ndynamic_batching {\r\n  priority_levels: 2\r\n}\r\n'
    written = edited(text, [Edit(DELAY, "7"), Edit(("max_batch_size",), None)], file="f")
    assert written == (
        'name: "a"\r\ndynamic_batching {\r\n  max_queue_delay_microseconds: 7\r\n  priority_levels: 2\r\n}\r\n'
    )
    assert with_head("\ufeff" + text, "weft tune: ", "x") == "# weft tune: x\n" + text


def test_one_of_several_messages_is_not_guessed() -> None:
    """Two instance groups have two counts."""
    with pytest.raises(UnsupportedError, match="'f' has 2 of 'instance_group'; change them by hand"):
        edited("instance_group [ { count: 1 }, { count: 2 } ]", [Edit(("instance_group", "count"), "3")], file="f")
