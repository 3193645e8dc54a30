"""The two networks of ``digits``: a small convolutional one as ONNX, a perceptron as a program of ``torch.export``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import nn
from torch.nn.functional import cross_entropy

from recipes.onnx_file import save_graph, tensor
from recipes.progress import steps

MAX_BATCH_SIZE = 32
BRIGHTEST = 16.0
_NUM_EPOCHS = 40
_BATCH_SIZE = 64
_LEARNING_RATE = 5e-3


class Classifier(nn.Module):
    """Scales pixels from 0..16 to 0..1 and answers as the served models do.

    Args:
        layers: From ``[n, 1, 8, 8]`` to 10 scores.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def scores(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scores, shape ``[n, 10]``."""
        scores: torch.Tensor = self.layers(pixels / BRIGHTEST)
        return scores

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """LABEL ``[n, 1]`` int64, and PROBS ``[n, 10]`` float32."""
        probabilities = self.scores(pixels).softmax(dim=1)
        return probabilities.argmax(dim=1, keepdim=True), probabilities


def train_cnn(pixels: NDArray[np.float32], labels: NDArray[np.int64]) -> Classifier:
    """Two convolutions of 3 x 3, one pooling, one linear layer."""
    return train(
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(32 * 4 * 4, 10),
        ),
        pixels,
        labels,
        name="cnn",
    )


def train_mlp(pixels: NDArray[np.float32], labels: NDArray[np.int64]) -> Classifier:
    """One hidden layer of 128."""
    return train(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10)),
        pixels,
        labels,
        name="mlp",
    )


def train(
    make_layers: Callable[[], nn.Sequential],
    pixels: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    name: str,
    seed: int = 0,
    num_epochs: int = _NUM_EPOCHS,
) -> Classifier:
    """Trained with a fixed seed by the one-cycle policy (Smith, 2018, https://arxiv.org/abs/1803.09820).

    Args:
        make_layers: From ``[n, 1, 8, 8]`` to 10 scores.
        pixels: FP32 ``[n, 1, 8, 8]``, 0 to 16.
        labels: int64 ``[n]``.
        name: Shown while it runs.
        seed: Of the first weights and the order of the pictures.
        num_epochs: How often it sees each picture.
    """
    torch.manual_seed(seed)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in a fixed order; at this size more threads gain nothing
    classifier = Classifier(make_layers())
    x, y = torch.from_numpy(pixels), torch.from_numpy(labels)
    num_steps = num_epochs * -(-len(x) // _BATCH_SIZE)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=num_steps)
    for _ in steps(num_epochs, f"training {name}"):
        order: Any = torch.randperm(len(x))
        for rows in order.split(_BATCH_SIZE):
            optimizer.zero_grad()
            loss: Any = cross_entropy(classifier.scores(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
    torch.set_num_threads(num_threads)
    return classifier.eval()


def save_cnn(path: Path, classifier: Classifier) -> None:
    """``path`` holds the network as ONNX; PIXELS ``[batch, 1, 8, 8]``, LABEL ``[batch, 1]``, PROBS ``[batch, 10]``."""
    weights = {name: value.detach().numpy() for name, value in classifier.layers.state_dict().items()}
    node = helper.make_node
    save_graph(
        path,
        [
            node("Div", ["PIXELS", "brightest"], ["scaled"]),
            node("Conv", ["scaled", "0.weight", "0.bias"], ["conv0"], pads=[1, 1, 1, 1]),
            node("Relu", ["conv0"], ["relu0"]),
            node("Conv", ["relu0", "2.weight", "2.bias"], ["conv1"], pads=[1, 1, 1, 1]),
            node("Relu", ["conv1"], ["relu1"]),
            node("MaxPool", ["relu1"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Flatten", ["pooled"], ["flat"]),
            node("Gemm", ["flat", "7.weight", "7.bias"], ["scores"], transB=1),
            node("Softmax", ["scores"], ["PROBS"]),
            node("ArgMax", ["PROBS"], ["LABEL"], axis=1),
        ],
        inputs=[tensor("PIXELS", TensorProto.FLOAT, "batch", 1, 8, 8)],
        outputs=[tensor("LABEL", TensorProto.INT64, "batch", 1), tensor("PROBS", TensorProto.FLOAT, "batch", 10)],
        weights=weights | {"brightest": np.float32(BRIGHTEST)},
    )


def save_mlp(path: Path, classifier: Classifier) -> None:
    """``path`` holds the exported program: PIXELS ``[1 to 32, 1, 8, 8]`` to the pair (LABEL, PROBS)."""
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH_SIZE)
    program = torch.export.export(classifier, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
