"""The file of keys: what it may hold, and what opens the door."""

import json
import os

import pytest

from weft.base.errors import InvalidArgumentError
from weft.base.security.keys import Grant, grant_of, new_key, read_keys


def written(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return [path]


@pytest.fixture
def entry():
    """A line of a new key."""
    return json.loads(new_key("shop")[1])


def test_new_key_opens_and_only_it(tmp_path):
    """The key that was made is found by its line; any other text, another's secret among them, is not."""
    key, line = new_key("shop")
    other, other_line = new_key("lab")
    grants = read_keys(written(tmp_path / "keys", "# who may call", "", line, other_line))
    assert "shop" == grant_of(grants, key).name
    for wrong in ("", "shop", "shop.", key[:-1], key + "x", key.upper(), f"shop.{other.partition('.')[2]}", "né.x"):
        assert grant_of(grants, wrong) is None


def test_file_never_holds_the_key():
    """Nothing of the secret is in the line that goes to the file, and two keys of one name differ."""
    (key, line), (again, _) = new_key("shop"), new_key("shop")
    assert key.partition(".")[2] not in line
    assert again != key


def test_two_hashes_are_two_valid_keys(tmp_path, entry):
    """While a key is replaced both the old and the new one open."""
    (old, old_line), (new, new_line) = new_key("shop"), new_key("shop")
    entry["sha256"] = [json.loads(old_line)["sha256"], json.loads(new_line)["sha256"]]
    grants = read_keys(written(tmp_path / "keys", entry))
    assert "shop" == grant_of(grants, old).name == grant_of(grants, new).name


def test_every_field_is_read(tmp_path, entry):
    """What the line allows arrives as it was written; what it leaves out is not limited, and no right is given."""
    rest = {"max_inflight": 2, "requests_per_s": 0.5, "burst": 3, "highest_priority": 4, "control": True}
    (grant,) = read_keys(
        written(tmp_path / "keys", {**entry, "certificates": "shop", "models": ["digits*", "t?"], **rest})
    ).values()
    assert Grant("shop", (entry["sha256"],), ("shop",), ("digits*", "t?"), 2, 0.5, 3, 4, True, False) == grant
    assert Grant("shop", (entry["sha256"],)) == read_keys(written(tmp_path / "keys", entry))["shop"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "secret"}, "64 hex digits"),
        ({"sha256": []}, "not empty"),
        ({"sha256": [1]}, "list of strings"),
        ({"name": ""}, "cannot name a key"),
        ({"name": "a.b"}, "cannot name a key"),
        ({"name": 7}, "'name' must be a string"),
        ({"models": []}, "not empty"),
        ({"models": "*", "role": 1}, "unknown field 'role'"),
        ({"max_inflight": 1.5}, "whole number"),
        ({"max_inflight": -1}, "from 0"),
        ({"max_inflight": True}, "whole number"),
        ({"requests_per_s": "fast"}, "must be a number"),
        ({"requests_per_s": float("nan")}, "must be a number"),
        ({"requests_per_s": 1e300}, "must be a number"),
        ({"control": 1}, "true or false"),
    ],
)
def test_wrong_field_is_refused_with_its_line(tmp_path, entry, change, message):
    """A line with a wrong field is refused, and the text has file, line number and the cure, but not the hash."""
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_keys(written(tmp_path / "keys", "# one", {**entry, **change}))
    assert f"{tmp_path / 'keys'}:2: " in caught.value.message
    assert entry["sha256"] not in caught.value.message


@pytest.mark.parametrize("text", ["", "# none\n", "{", "[]", '"x"', "{}", "[" * 100_000, "\x00", " " + "x" * 20_000])
def test_broken_file_is_refused(tmp_path, text):
    """No content of a file makes anything but an error that says what is wrong; a file without keys is one too."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match="keys file"):
        read_keys([path])


def test_not_utf8_and_not_there_are_refused(tmp_path):
    """A binary file, a folder, a missing file, and a pipe, which would hold the service, are each refused by name."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    for path in (binary, tmp_path, tmp_path / "missing", tmp_path / "pipe"):
        with pytest.raises(InvalidArgumentError, match=str(path)):
            read_keys([path])


def test_one_name_is_one_line(tmp_path, entry):
    """A second line of the same name, in whichever file, is refused, because limits would be ambiguous."""
    one, two = written(tmp_path / "one", entry) + written(tmp_path / "two", entry)
    with pytest.raises(InvalidArgumentError, match="already"):
        read_keys([one, two])
