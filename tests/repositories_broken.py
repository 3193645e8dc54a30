"""Repositories that serve, and what breaks them: for tests that what ``weft check`` passes loads, and only that.

``write_good`` writes one of ``GOOD``. ``mutate`` breaks it by one random change, ``apply`` by commands, one of them::

    rm PATH                    mv PATH PATH              write PATH TEXT (escapes of Python's strings)
    sub PATH OLD => NEW        trunc PATH BYTES          ln TARGET PATH              mkdir PATH
"""

import random
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from tests.encoders import save_encoder, save_tokenizer
from tests.integration.language_model import write_folder
from tests.unit.backends.files import byte_level, write_onnx

_X = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
_Y = 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
_ONNX = "m (float[N, 4] X) => (float[N, 4] Y) <float[4] W = {1, 2, 3, 4}> { Y = Add(X, W) }"
_PYTHON = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
_COMPLETED = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [4]})
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
_GRAPH = f"""name: "g"
platform: "graph"
max_batch_size: 8
{_X}{_Y}node {{ name: "root" sequence {{
  step {{ name: "first" model_name: "m" output_map {{ key: "Y" value: "mid" }} }}
  step {{ name: "second" model_name: "m" input_map {{ key: "X" value: "mid" }} }}
}} }}
"""
_ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 8
{_X}{_Y}ensemble_scheduling {{ step [ {{
  model_name: "m" model_version: -1
  input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }}
}} ] }}
"""
_BATCHED = 'backend: "onnxruntime"\nmax_batch_size: 8\n' + _X + _Y
_THREAD = 'parameters { key: "EXECUTION" value { string_value: "thread" } }\n'


def _onnx(config: str, text: str = _ONNX) -> Callable[[Path], None]:
    return lambda root: _write_model(root, config, lambda folder: write_onnx(folder / "model.onnx", text))


def _python(config: str, source: str = _PYTHON) -> Callable[[Path], None]:
    return lambda root: _write_model(root, config, lambda folder: _save(folder / "model.py", source))


def _save(path: Path, text: str) -> None:
    path.write_text(text)


def _write_model(root: Path, config: str, write: Callable[[Path], None]) -> None:
    folder = root / "model/m/1"
    folder.mkdir(parents=True)
    (root / "graphs").mkdir(exist_ok=True)
    (root / "model/m/config.pbtxt").write_text(config)
    write(folder)


class _Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"Y": x * 2}


def _pt2(root: Path) -> None:
    config = 'backend: "pytorch"\nmax_batch_size: 8\n' + _X.replace('"X"', '"x"') + _Y
    rows = torch.export.Dim("rows", max=16)

    def write(folder: Path) -> None:
        program = torch.export.export(_Doubled(), (torch.ones(2, 4),), dynamic_shapes={"x": {0: rows}})
        torch.export.save(program, str(folder / "model.pt2"))

    _write_model(root, config, write)


def _graph(root: Path) -> None:
    _onnx(_BATCHED)(root)
    (root / "graphs/g/1").mkdir(parents=True)
    (root / "graphs/g/1/graph.pbtxt").write_text(_GRAPH)


def _ensemble(root: Path) -> None:
    _onnx(_BATCHED)(root)
    (root / "graphs/e/1").mkdir(parents=True)
    (root / "graphs/e/config.pbtxt").write_text(_ENSEMBLE)


def _versions(root: Path) -> None:
    _onnx(_BATCHED + "version_policy { specific { versions: [ 1, 3 ] } }\n")(root)
    for version in ("2", "3"):
        shutil.copytree(root / "model/m/1", root / "model/m" / version)


def _sequence(root: Path) -> None:
    config = _BATCHED + (
        'sequence_batching {\n  max_sequence_idle_microseconds: 5000000\n  control_input [ { name: "START"\n'
        "    control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]\n}\n"
    )
    text = "m (float[N, 4] X, float[N, 1] START) => (float[N, 4] Y) { Y = Add(X, START) }"
    _onnx(config, text)(root)


def _warm(root: Path) -> None:
    _onnx(
        _BATCHED + 'model_warmup [ { name: "w" batch_size: 2 inputs { key: "X" value { data_type: TYPE_FP32 '
        "dims: [ 4 ] zero_data: true } } } ]\n"
    )(root)


def _labels(root: Path) -> None:
    _onnx(_BATCHED.replace('"Y"', '"Y" label_filename: "l.txt"'))(root)
    (root / "model/m/l.txt").write_text("a\nb\nc\nd\n")


def _llm(root: Path) -> None:
    _write_model(
        root,
        'backend: "llm"\nparameters { key: "num_blocks" value { string_value: "64" } }\n'
        'parameters { key: "max_num_seqs" value { string_value: "2" } }\n',
        write_folder,
    )


def _encoder(root: Path) -> None:
    def write(folder: Path) -> None:
        save_encoder(folder, "BertModel")
        save_tokenizer(folder)

    _write_model(root, 'backend: "encoder"\n', write)


def _transforms(root: Path) -> None:
    _onnx(_BATCHED)(root)
    folder = root / "preprocess/t/1"
    folder.mkdir(parents=True)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder.parent / "config.pbtxt").write_text(
        'backend: "tokenize"\nmax_batch_size: 8\ninput [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        'output [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] } ]\n'
        'parameters { key: "max_length" value { string_value: "16" } }\n'
    )


#: Repositories without a fault, by name.
GOOD: dict[str, Callable[[Path], None]] = {
    "onnx": _onnx(_BATCHED + "instance_group [ { count: 2 kind: KIND_CPU } ]\ndynamic_batching { }\n"),
    "whole": _onnx(""),
    "cached": _onnx(_BATCHED + "response_cache { enable: true }\nparameters { key: \"intra_op_thread_count\" value { "
                    "string_value: \"1\" } }\n"),
    "pt2": _pt2,
    "python": _python('backend: "python"\nmax_batch_size: 8\n' + _X + _Y + _THREAD),
    "completed": _python('backend: "python"\n', _COMPLETED),
    "graph": _graph,
    "ensemble": _ensemble,
    "versions": _versions,
    "sequence": _sequence,
    "warm": _warm,
    "labels": _labels,
    "llm": _llm,
    "encoder": _encoder,
    "transforms": _transforms,
}  # fmt: skip


@cache
def _template(name: str, folder: Path) -> Path:
    root = folder / name
    root.mkdir(parents=True)
    GOOD[name](root)
    return root


def write_good(name: str, templates: Path, root: Path) -> None:
    """Write one of ``GOOD``; what takes long is made once, in ``templates``."""
    shutil.copytree(_template(name, templates), root, symlinks=True)


def apply(command: str, root: Path) -> None:
    """Change a repository."""
    verb, name, *rest = command.split(" ", 2)
    path, text = root / name, rest[0] if rest else ""
    match verb:
        case "rm":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        case "mv":
            (root / text).parent.mkdir(parents=True, exist_ok=True)
            path.rename(root / text)
        case "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode().decode("unicode_escape").encode("latin-1"))
        case "sub":
            old, new = (part.encode().decode("unicode_escape") for part in text.split(" => "))
            content = path.read_text()
            assert old in content, f"{path} has no {old!r}"
            path.write_text(content.replace(old, new))
        case "trunc":
            path.write_bytes(path.read_bytes()[: int(text)])
        case "ln":
            (root / text).parent.mkdir(parents=True, exist_ok=True)
            (root / text).symlink_to(name)
        case "mkdir":
            path.mkdir(parents=True)
        case _:
            raise AssertionError(f"no such command: {command}")


def mutate(root: Path, chance: random.Random) -> str:
    """Break a repository, or not, by one random change; returns what it was."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    texts = [path for path in files if path.suffix == ".pbtxt" and path.stat().st_size]
    others = [path for path in files if path.suffix != ".pbtxt"]
    if texts and chance.random() < 0.75:
        path = chance.choice(texts)
        change = chance.choice(_TEXT_CHANGES)
        path.write_bytes(change(path.read_bytes(), chance))
        return f"{change.__name__.strip('_')} {path.relative_to(root)}"
    path = chance.choice(others)
    kind = chance.choice(("empty", "remove", "cut", "swap", "lfs", "rename", "upper", "loop"))
    content = path.read_bytes()
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
        case "cut":
            path.write_bytes(content[: len(content) * chance.randrange(1, 10) // 10])
        case "swap":
            path.write_bytes(b"\x00\xffnothing that is a model" + content[40:])
        case "lfs":
            path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        case "rename":
            path.rename(path.with_name(f"my_{path.name}"))
        case "upper":
            path.rename(path.with_name(path.name.upper()))
        case "loop":
            path.unlink()
            path.symlink_to(path.name)
    return f"{kind} {path.relative_to(root)}"


def _drop_line(text: bytes, chance: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def _double_line(text: bytes, chance: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    index = chance.randrange(len(lines))
    return b"".join([*lines[: index + 1], *lines[index:]])


def _drop_character(text: bytes, chance: random.Random) -> bytes:
    index = chance.randrange(len(text))
    return text[:index] + text[index + 1 :]


def _other_number(text: bytes, chance: random.Random) -> bytes:
    return _replaced(rb"(?<![\w.])\d+(?![\w.])", text, chance, (b"0", b"-1", b"3", b"5", b"64", b"2147483648", b"1.5"))


def _other_type(text: bytes, chance: random.Random) -> bytes:
    types = (b"TYPE_INT64", b"TYPE_FP16", b"TYPE_STRING", b"TYPE_BF16", b"TYPE_FLOAT", b"type_fp32")
    return _replaced(rb"TYPE_\w+", text, chance, types)


def _other_name(text: bytes, chance: random.Random) -> bytes:
    return _replaced(rb'"\w+"', text, chance, (b'"Z"', b'"x"', b'"Y"', b'""', b"Z", b"7"))


def _other_field(text: bytes, chance: random.Random) -> bytes:
    fields = (b"dim", b"name", b"Max_Batch_Size", b"data_type", b"kind")
    return _replaced(rb"\b[a-z_]+(?=\s*[:{\[])", text, chance, fields)


def _windows(text: bytes, chance: random.Random) -> bytes:
    return b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n")


def _cut(text: bytes, chance: random.Random) -> bytes:
    return text[: chance.randrange(len(text))]


_TEXT_CHANGES = (
    _drop_line, _double_line, _drop_character, _other_number, _other_number, _other_type, _other_name, _other_name,
    _other_field, _windows, _cut,
)  # fmt: skip


def _replaced(pattern: bytes, text: bytes, chance: random.Random, choices: Sequence[bytes]) -> bytes:
    found = [*re.finditer(pattern, text)]
    if not found:
        return text
    where = chance.choice(found)
    return text[: where.start()] + chance.choice(choices) + text[where.end() :]
