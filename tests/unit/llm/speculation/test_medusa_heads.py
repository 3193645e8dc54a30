"""Files of Medusa heads: what is written is read, and heads of another model are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.llm.engine_fixture import MODEL

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.speculation.medusa import Head, MedusaHeads, fingerprint

H = MODEL.hidden_size
WEIGHTS, DESCRIPTION = "medusa_heads.safetensors", "medusa_heads.json"


def model_folder(path: Path, value: float = 1.0) -> Path:
    """A folder with weights."""
    path.mkdir()
    save_file({"weight": torch.full((8,), value)}, path / "model.safetensors")
    return path


def new_heads(count: int, owner: Path) -> MedusaHeads:
    """Random heads of the model in ``owner``."""
    torch.manual_seed(0)
    heads = [Head(torch.randn(2 * H, H), torch.randn(H, H), torch.randn(H)) for _ in range(count)]
    return MedusaHeads(heads, fingerprint(owner))


def load(folder: Path, owner: Path) -> MedusaHeads:
    return MedusaHeads.load(folder, owner, MODEL, torch.float32, "cpu")


def test_saved_heads_are_loaded(tmp_path: Path) -> None:
    """Weights survive bit for bit, and the facts stand in the description."""
    owner = model_folder(tmp_path / "model")
    heads = new_heads(3, owner)
    heads.save(tmp_path / "heads", {"num_training_tokens": 7})
    loaded = load(tmp_path / "heads", owner)
    for ours, theirs in zip(heads.heads, loaded.heads, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert json.loads((tmp_path / "heads/medusa_heads.json").read_text())["num_training_tokens"] == 7
    assert {path.name for path in (tmp_path / "heads").iterdir()} == {"medusa_heads.json", "medusa_heads.safetensors"}


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    """A model whose weights differ in value alone does not get the heads; a copy under another name does."""
    owner = model_folder(tmp_path / "model")
    new_heads(1, owner).save(tmp_path / "heads", {})
    with pytest.raises(InvalidArgumentError, match=r"are of another model, .*weft train-heads"):
        load(tmp_path / "heads", model_folder(tmp_path / "other", 2.0))
    copy = model_folder(tmp_path / "copy")
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    assert load(tmp_path / "heads", copy).fingerprint == fingerprint(owner)


def test_the_fingerprint_sees_every_part_of_a_large_file(tmp_path: Path) -> None:
    """Of a file too large to be read whole, a change of a stretch as long as the space between chunks shows."""
    owner = model_folder(tmp_path / "model")
    path = owner / "model.safetensors"
    size = 64 << 20
    with path.open("wb") as file:
        file.truncate(size)
    before = fingerprint(owner)
    for start in (0, size // 3, size - (512 << 10)):
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"\x01" * (512 << 10))
        after = fingerprint(owner)
        assert after != before
        before = after


def write(name: str, content: bytes | None) -> Callable[[Path], object]:
    """Replaces a file; None takes it away."""
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_bytes(content)


def described(**changes: object) -> Callable[[Path], object]:
    """Changes fields of the description; None takes one away."""

    def change(folder: Path) -> None:
        path = folder / DESCRIPTION
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))

    return change


def reshape(folder: Path) -> None:
    parts = {"state": torch.zeros(H, H), "token": torch.zeros(H, H), "bias": torch.zeros(H)}
    save_file({f"heads.0.{name}": part for name, part in parts.items()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (write(WEIGHTS, None), NotFoundError, "no file "),
        (write(DESCRIPTION, None), NotFoundError, "no file "),
        (write(WEIGHTS, b"torn"), InvalidArgumentError, "is torn or no safetensors file"),
        (write(DESCRIPTION, b"{"), InvalidArgumentError, "is not JSON"),
        (described(num_heads=None), InvalidArgumentError, "must have format, fingerprint, hidden_size, num_heads"),
        (described(num_heads=0), InvalidArgumentError, "num_heads at least 1, got 1 and 0"),
        (described(format=2), InvalidArgumentError, "format must be 1"),
        (described(num_heads=2), InvalidArgumentError, "'heads.1.state' must have shape .*, got none"),
        (described(hidden_size=99), InvalidArgumentError, "of width 99, those of the model have 32"),
        (reshape, InvalidArgumentError, r"'heads.0.state' must have shape \[64, 32\], got \[32, 32\]"),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path, change: Callable[[Path], object], error: type[Exception], problem: str
) -> None:
    """Each message says what is wrong and how heads are made."""
    owner = model_folder(tmp_path / "model")
    new_heads(1, owner).save(tmp_path / "heads", {})
    change(tmp_path / "heads")
    with pytest.raises(error, match=problem) as told:
        load(tmp_path / "heads", owner)
    assert "weft train-heads" in str(told.value)
