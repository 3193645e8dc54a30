"""The models as plain Python, for systems whose models are Python: the samples' files, read by the same libraries."""

import base64
import io
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image
from scipy import ndimage
from sklearn.ensemble import RandomForestClassifier

MODELS = Path(__file__).resolve().parents[3] / "model_repository/model"
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def decode(images: list[str], width: int = 8, height: int = 8) -> np.ndarray:
    """Pictures in base64 to gray values from 0 to 16; FP32 [n, 1, height, width]."""
    pictures = [Image.open(io.BytesIO(base64.b64decode(image))).convert("L") for image in images]
    rows = [np.asarray(one.resize((width, height), Image.Resampling.BOX), np.float32) * 16 / 255 for one in pictures]
    return np.array(rows, np.float32).reshape(-1, 1, height, width)


class Digits:
    """A classifier of digits, by its name among the samples."""

    def __init__(self, name: str) -> None:
        folder = MODELS / name / "1"
        if (folder / "training.npz").exists():
            with np.load(folder / "training.npz") as training:
                pixels = training["images"].astype(np.float32) * np.float32(16 / 255)
                forest = RandomForestClassifier(n_estimators=50, random_state=0, n_jobs=1)
                forest.fit(pixels.reshape(len(pixels), -1), training["labels"])
            self.probabilities = lambda pixels: forest.predict_proba(pixels.reshape(len(pixels), -1))
        else:
            session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
            self.probabilities = lambda pixels: session.run(["PROBS"], {"PIXELS": pixels})[0]

    def __call__(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """PIXELS, FP32 [n, 1, 8, 8], to LABEL, INT64 [n, 1], and PROBS, FP32 [n, 10]."""
        probs = self.probabilities(pixels).astype(np.float32)
        return {"LABEL": probs.argmax(axis=1, keepdims=True), "PROBS": probs}


def name_digit(probs: np.ndarray) -> list[str]:
    """The most likely digit of each row in words."""
    return [NAMES[row.argmax()] for row in probs]


def find_digits(page: np.ndarray) -> dict[str, np.ndarray]:
    """Patches of ink of a page, [32, 96], line by line: BOXES, INT64 [k, 4], and CROPS, FP32 [k, 1, 8, 8]."""
    near = ndimage.binary_dilation(page > 2, np.ones((3, 3)))
    patches = ndimage.find_objects(ndimage.label(near)[0])
    boxes = sorted(
        ((x.start + 1, y.start + 1, x.stop - 1, y.stop - 1) for y, x in patches),
        key=lambda box: (box[1] // 16, box[0]),
    )
    crops = np.zeros((len(boxes), 1, 8, 8), np.float32)
    for crop, (left, top, right, bottom) in zip(crops, boxes, strict=True):
        ink = page[top:bottom, left:right][:8, :8]
        y, x = (8 - ink.shape[0]) // 2, (8 - ink.shape[1]) // 2
        crop[0, y : y + ink.shape[0], x : x + ink.shape[1]] = ink
    return {"BOXES": np.array(boxes, np.int64).reshape(-1, 4), "CROPS": crops}
