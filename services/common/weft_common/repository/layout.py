"""Classifies a ``config.pbtxt`` as an ensemble, which the router serves, or a model, by its text, which may be invalid.

In a repository of Triton Inference Server both are in the same folder.
"""

import re
from pathlib import Path

_ENSEMBLE = re.compile(r"^\s*ensemble_scheduling\b|\bplatform\s*:\s*[\"'](ensemble|graph)[\"']", re.MULTILINE)
_MODEL = re.compile(r"^\s*(backend|platform)\s*:", re.MULTILINE)


def is_ensemble(config: Path) -> bool:
    """Whether the file declares an ensemble. Raises OSError."""
    return _ENSEMBLE.search(_text(config)) is not None


def is_model(config: Path) -> bool:
    """Whether the file names a backend and declares no ensemble. Raises OSError."""
    text = _text(config)
    return _ENSEMBLE.search(text) is None and _MODEL.search(text) is not None


def _text(config: Path) -> str:
    return config.read_text(encoding="utf-8", errors="replace")
