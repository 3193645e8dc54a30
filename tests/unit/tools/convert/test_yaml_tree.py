"""YAML with positions, and YAML that means harm."""

import contextlib
import json
import time

import pytest

from weft.tools.convert.yaml_tree import MAX_FILE_BYTES, Source, UnreadableError, YamlValue


def read(text: str) -> YamlValue:
    """The only document of a text."""
    (document,) = Source(text, "f.yaml").documents()
    return document


def plain(value: YamlValue) -> object:
    """A value without positions."""
    if value.kind == "mapping":
        return {key: plain(one) for key, one in value.entries.items()}
    return [plain(one) for one in value.items] if value.kind == "list" else value.text


def test_values_know_where_they_stand() -> None:
    """Line and column of a mapping's value, of an item, of a value in braces; 1-based."""
    document = read("a:\n  - x: 'ü'\n    b: 7\nc: {d: [1, 2]}\n")
    item = document.entries["a"].items[0]
    assert (3, 8, "7") == (item.entries["b"].line, item.entries["b"].column, item.entries["b"].text)
    second = document.entries["c"].entries["d"].items[1]
    assert (4, 12) == (second.line, second.column)


def test_documents_without_content_are_left_out() -> None:
    """As between two separators, or after the last."""
    assert ["1", "2"] == [d.text for d in Source("---\n1\n---\n---\n2\n---\n", "f").documents()]
    assert [] == Source("# nothing\n", "f").documents()


def test_json_is_yaml_tabs_included() -> None:
    """What Seldon's samples are written in."""
    given = {"a": [1, {"b": "x\ty"}], "c": None}
    document = read(json.dumps(given, indent="\t"))
    assert {"a": ["1", {"b": "x\ty"}]} == plain(document)


def test_anchors_and_merge_keys_mean_what_they_stand_for() -> None:
    """An entry of the mapping itself wins over a merged one, the first merged over the second."""
    document = read("a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], x: 0}\nd: *a\n")
    assert {"x": "0", "y": "2", "z": "4"} == plain(document.entries["c"])
    assert document.entries["a"] is document.entries["d"]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("a: [1\nb: 2", (2, 2), "not YAML: did not find expected ',' or ']'"),
        ("a: *nobody", (1, 4), "unknown anchor 'nobody'"),
        ("a: &a [1, *a]", (1, 11), "anchor 'a' contains itself"),
        ("? [1]\n: 2", (1, 3), "a key must be a string, got a list"),
        ("a: {<<: 3}", (1, 9), "'<<' takes a mapping, or a list of mappings"),
        ("[" * 65 + "]" * 65, (1, 65), "nested deeper than 64"),
        ("- " * 100_000, (1, 129), "nested deeper than 64"),
        ("name: {{ .Release.Name }}-x", None, "it looks like a Helm template"),
        ("a: \x00", None, "not YAML"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: tuple[int, int] | None, message: str) -> None:
    """The first fault, and where it is."""
    with pytest.raises(UnreadableError) as caught:
        Source(text, "f.yaml").documents()
    found = caught.value.diagnostic
    assert message in found.message
    assert place in (None, (found.line, found.column))


def test_a_key_that_stands_twice_is_an_error_at_the_second() -> None:
    """The file says two things; the first is read on."""
    source = Source("a: 1\nb: 2\na: 3\n", "f.yaml")
    (document,) = source.documents()
    assert {"a": "1", "b": "2"} == plain(document)
    assert [(3, 1, "'a' is given twice")] == [(d.line, d.column, d.message) for d in source.diagnostics]


def test_a_bomb_of_aliases_is_refused_before_it_is_large() -> None:
    """Ten lists of ten of the list before: a billion values in ten lines."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    with pytest.raises(UnreadableError, match="more than 100000 values"):
        Source("\n".join(lines), "f.yaml").documents()


def test_a_file_of_the_largest_size_takes_seconds_not_minutes() -> None:
    """Whatever is in it."""
    for piece in ("a", "- ", "[", "&a ", "'", "? ", "- x\n", "k: {}\n"):
        text = (piece * (MAX_FILE_BYTES // len(piece)))[:MAX_FILE_BYTES]
        start_s = time.process_time()
        with contextlib.suppress(UnreadableError):
            Source(text, "f.yaml").documents()
        assert time.process_time() - start_s < 20


def test_wrong_types_are_reported_and_read_as_nothing() -> None:
    """So that one run finds everything."""
    source = Source("a: [1]\nb: x\nc: {}\nd: .inf\ne: [~]\n", "f.yaml")
    given = source.documents()[0].entries
    assert {} == source.mapping(given["a"], "'a'")
    assert [] == source.sequence(given["b"], "'b'")
    assert "" == source.string(given["c"], "'c'")
    assert None is source.number(given["b"], "'b'")
    assert None is source.number(given["d"], "'d'")
    assert source.boolean(given["b"], "'b'") is False
    assert "" == source.choice(given["b"], "fruit", ("apple", "box"))
    assert 7 == len(source.diagnostics)
    assert "unknown fruit 'x'; use one of: apple, box" == source.diagnostics[-1].message
    (nothing,) = given["e"].items
    assert ({}, [], "", None) == (
        source.mapping(nothing, "'e'"),
        source.sequence(nothing, "'e'"),
        source.string(nothing, "'e'"),
        source.number(nothing, "'e'"),
    )
    assert 7 == len(source.diagnostics)
