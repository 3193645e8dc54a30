"""What the pipelines of examples/comparison are asked and answer, and the faults that are put into ``classify``."""

import base64
import io
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

DIGITS = Path(__file__).resolve().parents[2] / "model_repository/data/digits"
#: File below examples/comparison, a text in it, and what takes its place.
Edit = tuple[str, str, str]

_LABELS = [[digit] for digit in range(10)]
ANSWERS = {
    "classify": {"NAME": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]},
    "ab_test": {"LABEL": _LABELS},
    "cascade": {"LABEL": _LABELS},
    "vote": {"LABEL": _LABELS},
    "read_page": {
        "DIGITS": [[3], [1], [4], [1], [5], [9]],
        "BOXES": [
            [6, 2, 11, 10], [21, 4, 26, 12], [38, 1, 43, 9], [59, 3, 64, 11], [77, 5, 82, 13], [13, 20, 19, 28],
        ],
    },
}  # fmt: skip

_PLAIN = "models/plain.py"
_NINE = [(_PLAIN, "width: int = 8, height: int = 8", "width: int = 9, height: int = 9")]
_FP64 = [(_PLAIN, "np.array(rows, np.float32)", "np.array(rows, np.float64)")]
#: The classifier raises for every second request.
_FLAKY = [
    (_PLAIN, "self.probabilities(pixels)", "(self.probabilities if next(TURNS) % 2 else 1 / 0)(pixels)"),
    (_PLAIN, "\nclass Digits:", "\nTURNS = itertools.count()\n\n\nclass Digits:"),
    (_PLAIN, "import io\n", "import io\nimport itertools\n"),
]
#: Fault -> system -> the edits that make it.
FAULTS: dict[str, dict[str, list[Edit]]] = {
    "name": {
        "ray_serve": [("classify/ray_serve.py", 'found["PROBS"]', 'found["PROB"]')],
        "bentoml": [("classify/bentoml_service.py", 'found["PROBS"]', 'found["PROB"]')],
        "kserve": [("classify/kserve.yaml", "data: $response", "data: $respones")],
    },
    "dtype": {"ray_serve": _FP64, "bentoml": _FP64, "kserve": _FP64},
    "shape": {
        "ray_serve": [("classify/ray_serve.py", "Decode.bind()", "Decode.bind(9, 9)")],
        "bentoml": [("classify/bentoml_service.py", "decode(images)", "decode(images, width=9, height=9)")],
        "kserve": _NINE,
    },
    "missing": {
        "ray_serve": [("classify/ray_serve.py", '"digits_cnn"', '"digits_cnnn"')],
        "bentoml": [("models/bentoml_models.py", '"digits_cnn"', '"digits_cnnn"')],
        "kserve": [("classify/kserve.yaml", "digits-cnn", "digits-cnnn")],
    },
    "flaky": {"ray_serve": _FLAKY, "bentoml": _FLAKY, "kserve": _FLAKY},
}


@cache
def pictures(pipeline: str) -> list[str]:
    """Ten digits, or one page of six, as pictures in base64."""
    if pipeline != "read_page":
        files = [DIGITS / f"{digit}.png" for digit in range(10)]
        return [base64.b64encode(file.read_bytes()).decode() for file in files]
    digits, page = load_digits(), np.zeros((32, 96))
    for digit, x, y in [(3, 4, 2), (1, 20, 4), (4, 37, 1), (1, 58, 3), (5, 76, 5), (9, 12, 20)]:
        page[y : y + 8, x : x + 8] = digits.images[digits.target == digit][5]
    stream = io.BytesIO()
    Image.fromarray((page * 255 / 16).astype(np.uint8)).save(stream, "PNG")
    return [base64.b64encode(stream.getvalue()).decode()]
