"""`weft init --hf`: what lies in the cache of Hugging Face is a model, without a copy and without the network."""

import hashlib
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.llm.speculation.folders import write_model

from weft.backends import BACKENDS
from weft.base.core import CallContext, InferCall
from weft.base.tensors import decode, encode
from weft.cli.__main__ import main
from weft.serving.core import ServingCore
from weft.tools.hub import cache_folder
from weft_protos.sentencepiece_pb2 import ModelProto, TrainerSpec

_COMMIT = "1234567890abcdef1234567890abcdef12345678"


@pytest.fixture(name="cache")
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``acme/tiny`` in a cache, laid out as ``huggingface_hub`` does: files are links to blobs."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/models--acme--tiny"
    snapshot = folder / "snapshots" / _COMMIT
    for path in (snapshot, folder / "blobs", folder / "refs"):
        path.mkdir(parents=True)
    (folder / "refs/main").write_text(_COMMIT)
    for file in write_model(tmp_path / "made", vocab_size=300).iterdir():
        _store(folder, file.name, file.read_bytes())
    proto = ModelProto()
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 27]
    for number, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        proto.pieces.add(piece=text, score=-number, type=kind)  # type: ignore[arg-type]
    proto.trainer_spec.model_type = TrainerSpec.BPE
    _store(folder, "tokenizer.model", proto.SerializeToString())
    return folder


def _store(folder: Path, name: str, content: bytes) -> Path:
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    link = folder / "snapshots" / _COMMIT / name
    link.unlink(missing_ok=True)
    link.symlink_to(Path("../../blobs") / blob.name)
    return blob


def _init(tmp_path: Path, *more: str) -> int:
    return main(["init", str(tmp_path / "mine"), "--hf", "acme/tiny", *more])


async def test_a_model_of_the_cache_is_served(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The entry is a configuration and a link; the model continues a text, and a second one of the name is refused."""
    assert _init(tmp_path) == 0
    entry = tmp_path / "mine/model/tiny"
    assert capsys.readouterr().out.splitlines()[1] == f"{entry / '1'} -> {cache / 'snapshots' / _COMMIT}"
    assert (entry / "1").is_symlink()
    assert sorted(path.name for path in entry.iterdir()) == ["1", "config.pbtxt"]
    assert main(["check", str(tmp_path / "mine")]) == 0
    core = ServingCore(tmp_path / "mine/model", BACKENDS, num_gpus=0)
    await core.start()
    try:
        call = InferCall("tiny", inputs={"text_input": encode(np.array([b"abc def"], np.object_))})
        result = await core.infer(call, CallContext())
    finally:
        await core.close(grace_s=5)
    assert decode(result.outputs["text_output"])[0].startswith(b"abc def")
    assert _init(tmp_path) == 1
    assert "ALREADY_EXISTS" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "~/x"},
        {"HF_HOME": "~/h"},
        {"HF_HOME": "~nobody-of-this-name/h"},
        {"HF_HOME": "$HOME/h"},
        {"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "~/old"},
        {"HF_HUB_CACHE": "${HOME}/c", "HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"},
    ],
    ids=str,
)
def test_the_cache_is_where_the_library_has_it(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Whatever variables say so."""
    constants = pytest.importorskip("huggingface_hub.constants").__file__
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == runpy.run_path(constants)["HF_HUB_CACHE"]


@pytest.mark.parametrize("revision", [_COMMIT, "v1", "pr/1"])
def test_revisions(cache: Path, tmp_path: Path, revision: str) -> None:
    """A commit, a tag, a branch with a slash."""
    if revision != _COMMIT:
        (cache / "refs" / revision).parent.mkdir(exist_ok=True)
        (cache / "refs" / revision).write_text(_COMMIT + "\n")
    assert _init(tmp_path, "--revision", revision) == 0
    assert (tmp_path / "mine/model/tiny/1").resolve().name == _COMMIT


def test_encoders(cache: Path, tmp_path: Path) -> None:
    """A model that gives vectors or scores is one of the backend ``encoder``."""
    _store(cache, "config.json", b'{"architectures": ["BertModel"]}')
    assert _init(tmp_path) == 0
    assert 'backend: "encoder"' in (tmp_path / "mine/model/tiny/config.pbtxt").read_text()


def _no_cache(cache: Path) -> None:
    cache.rename(cache.with_name("gone"))


def _no_refs(cache: Path) -> None:
    (cache / "refs/main").unlink()


def _reference_outside(cache: Path) -> None:
    (cache / "refs/main").write_text("../../../other")


def _no_config(cache: Path) -> None:
    (cache / "snapshots" / _COMMIT / "config.json").unlink()


def _torn(cache: Path) -> None:
    """A link to a blob that is still being fetched."""
    blob = (cache / "snapshots" / _COMMIT / "model.safetensors").resolve()
    blob.rename(blob.with_name("abc.incomplete"))


def _no_shard(cache: Path) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    _store(cache, "model.safetensors.index.json", json.dumps(index).encode())
    (cache / "snapshots" / _COMMIT / "model.safetensors").rename(
        cache / "snapshots" / _COMMIT / "model-1-of-2.safetensors"
    )


def _wrong_index(cache: Path) -> None:
    _no_shard(cache)
    _store(cache, "model.safetensors.index.json", b'{"weight_map": [1]}')


def _pickles(cache: Path) -> None:
    (cache / "snapshots" / _COMMIT / "model.safetensors").unlink()
    _store(cache, "pytorch_model.bin", b"\x80")


def _consolidated(cache: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (cache / "snapshots" / _COMMIT / name).unlink()
    _store(cache, "consolidated.safetensors", b"")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_cache, "'acme/tiny' is not in {cache}; fetch it: hf download acme/tiny, or give --download"),
        (_no_refs, f"has no revision 'main' in {{cache}}/models--acme--tiny, it has {_COMMIT}; give one of them"),
        (_reference_outside, "has no revision 'main'"),
        (_no_config, "is incomplete: 'config.json' is missing; fetch it: hf download acme/tiny"),
        (_torn, "'model.safetensors' is missing, and the download of 'abc.incomplete' is unfinished"),
        (_no_shard, "is incomplete: 'model-2-of-2.safetensors' is missing"),
        (_wrong_index, "must have 'weight_map'"),
        (_pickles, "has no model.safetensors; its *.bin are pickles, which can run code and are not read; save them"),
        (_consolidated, "; its consolidated* are Mistral's own form; take its files for transformers"),
    ],
)
def test_what_cannot_be_served(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, words: str
) -> None:
    """What is missing or of another form is named with the cure, and nothing is written."""
    damage(cache)
    assert _init(tmp_path) == 1
    assert words.format(cache=cache.parent) in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hf", "../x"], "like ORG/NAME, got '../x'"),
        (["--hf", "a/b/c"], "like ORG/NAME"),
        (["--hf", ""], "like ORG/NAME"),
        (["--hf", "acme/tiny", "--revision", "../../x"], "must be a branch, a tag or a commit"),
        (["--hf", "acme/tiny", "--revision", ""], "must be a branch, a tag or a commit"),
        (["x", "--download"], "--download and --revision are of --hf ORG/NAME"),
        (["x", "--revision", "v1"], "--download and --revision are of --hf ORG/NAME"),
        ([], "give a new or empty folder, or --hf ORG/NAME"),
    ],
)
def test_wrong_arguments(cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """Names and revisions that would leave the cache, and none at all."""
    assert main(["init", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_download(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with --download, and with what ``huggingface_hub`` is asked for; its errors are told."""
    asked: list[tuple[str, str]] = []

    def fetch(name: str, *, revision: str, allow_patterns: list[str]) -> None:
        asked.append((name, revision))
        cache.with_name("gone").rename(cache)
        assert "model*.safetensors" in allow_patterns

    _no_cache(cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fetch))
    assert _init(tmp_path) == 1
    assert not asked
    assert _init(tmp_path, "--download") == 0
    assert asked == [("acme/tiny", "main")]


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_download_that_fails(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_installed: bool,
) -> None:
    """Without the package, or without the network."""

    def fetch(name: str, **more: Any) -> None:
        raise OSError("no route to host")

    made = SimpleNamespace(snapshot_download=fetch) if is_installed else None
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    assert _init(tmp_path, "--download") == 1
    words = "'acme/tiny' cannot be fetched: no route to host" if is_installed else "pip install huggingface_hub"
    assert words in capsys.readouterr().err
