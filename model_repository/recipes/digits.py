"""``digits``: three classifiers of handwritten digits, trained on the images that scikit-learn brings along."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from recipes.catalog import (
    DIGITS_CNN,
    DIGITS_FOREST_CODE,
    DIGITS_HELD_OUT,
    DIGITS_MLP,
    DIGITS_PNGS,
    DIGITS_TRAINING,
)
from recipes.digits_networks import MAX_BATCH_SIZE, save_cnn, save_mlp, train_cnn, train_mlp
from recipes.recipe import SOURCE, Figures

_LEAST_ACCURACY = 0.95
_PNG_SIZE = (64, 64)  # large enough to look at; eight times the size of the data, so that nothing is lost


class Split(NamedTuple):
    """Images, uint8 ``[n, 8, 8]``, 0 black to 255 white ink as in a PNG file; and their digits, int64 ``[n]``."""

    training_images: NDArray[np.uint8]
    training_labels: NDArray[np.int64]
    held_out_images: NDArray[np.uint8]
    held_out_labels: NDArray[np.int64]


def load_split() -> Split:
    """The same split on every call: a quarter of each digit's images is held out."""
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    training, held_out, training_labels, held_out_labels = train_test_split(
        images, labels, test_size=0.25, stratify=labels, random_state=0
    )
    return Split(training, training_labels, held_out, held_out_labels)


def to_pixels(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What ``decode_digit`` makes of such images: FP32, shape ``[n, 1, 8, 8]``, 0 to 16."""
    return images.astype(np.float32)[:, None] * np.float32(16 / 255)


def build(repository: Path, stage: Path) -> Figures:
    """Three classifiers, the held-out images and one picture of each digit are written.

    Returns:
        Held-out accuracy of each classifier, of their vote and of their averaged probabilities.

    Raises:
        ValueError: A classifier is worse than it should be, or the vote is worse than its worst member.
    """
    split = load_split()
    np.savez_compressed(stage / DIGITS_TRAINING, images=split.training_images, labels=split.training_labels)
    np.savez_compressed(stage / DIGITS_HELD_OUT, images=split.held_out_images, labels=split.held_out_labels)
    for digit, path in enumerate(DIGITS_PNGS):
        image = Image.fromarray(split.held_out_images[split.held_out_labels == digit][0])
        image.resize(_PNG_SIZE, Image.Resampling.NEAREST).save(stage / path)
    training = to_pixels(split.training_images), split.training_labels
    save_cnn(stage / DIGITS_CNN, train_cnn(*training))
    save_mlp(stage / DIGITS_MLP, train_mlp(*training))

    pixels = to_pixels(split.held_out_images)
    probabilities = {
        "cnn": _cnn_probabilities(stage / DIGITS_CNN, pixels),
        "mlp": _mlp_probabilities(stage / DIGITS_MLP, pixels),
        "forest": _forest_probabilities(stage / DIGITS_TRAINING, pixels),
    }
    figures = _accuracies(probabilities, split.held_out_labels)
    worst = min(figures[name] for name in probabilities)
    if worst < _LEAST_ACCURACY or figures["vote"] < worst:
        raise ValueError(f"{figures}: no accuracy may be below {_LEAST_ACCURACY}, nor the vote's below every member's")
    return figures


def _cnn_probabilities(model: Path, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    probabilities: NDArray[np.float32] = session.run(["PROBS"], {"PIXELS": pixels})[0]
    return probabilities


def _mlp_probabilities(model: Path, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    network: Any = torch.export.load(model).module()
    rows: Any = torch.from_numpy(pixels)
    with torch.inference_mode():
        batches = [network(batch)[1].numpy() for batch in rows.split(MAX_BATCH_SIZE)]
    return np.concatenate(batches)


def _forest_probabilities(training_data: Path, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """By the code that the model service runs."""
    spec: Any = importlib.util.spec_from_file_location("digits_forest", SOURCE / DIGITS_FOREST_CODE)
    code: Any = importlib.util.module_from_spec(spec)
    backend_utils = "triton_python_backend_utils"  # there in the model service only; fitting does not use it
    sys.modules[backend_utils] = ModuleType(backend_utils)
    try:
        spec.loader.exec_module(code)
    finally:
        del sys.modules[backend_utils]
    probabilities: NDArray[np.float32] = code.predict_probabilities(code.fit_forest(training_data), pixels)
    return probabilities


def _accuracies(probabilities: dict[str, NDArray[np.float32]], labels: NDArray[np.int64]) -> Figures:
    """Share of right answers; a tied vote goes to the member that was named first, as in the graph."""
    members = np.stack([member.argmax(axis=1) for member in probabilities.values()])
    num_votes = (members[:, None] == members[None]).sum(axis=1)  # for the answer of each member, shape [members, n]
    vote = np.take_along_axis(members, num_votes.argmax(axis=0)[None], axis=0)[0]
    average = np.mean(list(probabilities.values()), axis=0).argmax(axis=1)
    answers = dict(zip(probabilities, members, strict=True)) | {"vote": vote, "average": average}
    return {name: float((answer == labels).mean()) for name, answer in answers.items()}
