"""``digits_cascade``: a cheap and a dear classifier of digits, for a graph that asks the second only in doubt.

The small one is a linear layer. The large one is a committee: several wider networks, each of which looks at the
picture nine times, moved by one pixel in every direction, and all of whose answers are averaged.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper
from torch import nn

from recipes.catalog import DIGITS_COMMITTEE, DIGITS_TINY
from recipes.digits import load_split, to_pixels
from recipes.digits_networks import BRIGHTEST, train
from recipes.onnx_file import save_graph, tensor
from recipes.recipe import Figures

#: The ``accept`` of graphs/digits_cascade: below it a picture goes on to the committee.
_ACCEPT = 0.8
_NUM_MEMBERS = 3
_MEMBER_EPOCHS = 20  # twice as many make the committee right in 0.2 % more
_NUM_CHANNELS = (24, 48)
_MOVES = tuple((y, x) for y in range(3) for x in range(3))
_LEAST_GAIN = 0.01


def build(repository: Path, stage: Path) -> Figures:
    """Both classifiers are written.

    Returns:
        Held-out accuracy of each and of the cascade, and the share of pictures that went on to the committee.

    Raises:
        ValueError: The committee is not better than the linear layer by so much that asking it is worth anything.
    """
    split = load_split()
    training = to_pixels(split.training_images), split.training_labels
    _save(stage / DIGITS_TINY, *_tiny(train(_tiny_layers, *training, name="tiny")))
    members = [
        train(_member_layers, *training, name=f"member {i + 1}", seed=i, num_epochs=_MEMBER_EPOCHS)
        for i in range(_NUM_MEMBERS)
    ]
    _save(stage / DIGITS_COMMITTEE, *_committee(members))
    tiny, committee = (_probabilities(stage / path, split.held_out_images) for path in (DIGITS_TINY, DIGITS_COMMITTEE))
    is_unsure = tiny.max(axis=1) < _ACCEPT
    cascade = np.where(is_unsure[:, None], committee, tiny)
    figures = {
        name: float((answer.argmax(axis=1) == split.held_out_labels).mean())
        for name, answer in {"tiny": tiny, "committee": committee, "cascade": cascade}.items()
    } | {"asked the committee": float(is_unsure.mean())}
    if figures["committee"] < figures["tiny"] + _LEAST_GAIN:
        raise ValueError(f"{figures}: the committee must be better than the tiny one by {_LEAST_GAIN}")
    return figures


def _tiny_layers() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def _member_layers() -> nn.Sequential:
    first, second = _NUM_CHANNELS
    return nn.Sequential(
        _Move(),
        nn.Conv2d(1, first, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(second * 4 * 4, 10),
    )


class _Move(nn.Module):
    """Moves each batch by up to one pixel while training, so that the committee may move pictures too."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return pixels
        shifts: Any = torch.randint(-1, 2, (2,)).tolist()
        padded = nn.functional.pad(pixels, (1, 1, 1, 1))
        moved: torch.Tensor = padded[:, :, 1 + shifts[0] : 9 + shifts[0], 1 + shifts[1] : 9 + shifts[1]]
        return moved


def _tiny(classifier: nn.Module) -> tuple[list[NodeProto], dict[str, NDArray[Any]]]:
    node = helper.make_node
    nodes = [
        node("Div", ["PIXELS", "brightest"], ["scaled"]),
        node("Flatten", ["scaled"], ["flat"]),
        node("Gemm", ["flat", "1.weight", "1.bias"], ["scores"], transB=1),
        node("Softmax", ["scores"], ["PROBS"]),
    ]
    return nodes, _weights(classifier, "")


def _committee(members: list[nn.Module]) -> tuple[list[NodeProto], dict[str, NDArray[Any]]]:
    """All nine moves of all rows are one batch of each member."""
    node = helper.make_node
    nodes = [node("Div", ["PIXELS", "brightest"], ["scaled"]), node("Pad", ["scaled", "margins"], ["padded"])]
    weights: dict[str, NDArray[Any]] = {
        "margins": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "axes": np.array([2, 3]),
        "by_move": np.array([len(_MOVES), -1, 10]),
        "over_moves": np.array([0]),
    }
    for k, (y, x) in enumerate(_MOVES):
        weights |= {f"start{k}": np.array([y, x]), f"end{k}": np.array([y + 8, x + 8])}
        nodes.append(node("Slice", ["padded", f"start{k}", f"end{k}", "axes"], [f"moved{k}"]))
    nodes.append(node("Concat", [f"moved{k}" for k in range(len(_MOVES))], ["views"], axis=0))
    for i, member in enumerate(members):
        weights |= _weights(member, f"m{i}.")
        nodes += [
            node("Conv", ["views", f"m{i}.1.weight", f"m{i}.1.bias"], [f"m{i}.conv0"], pads=[1, 1, 1, 1]),
            node("Relu", [f"m{i}.conv0"], [f"m{i}.relu0"]),
            node("Conv", [f"m{i}.relu0", f"m{i}.3.weight", f"m{i}.3.bias"], [f"m{i}.conv1"], pads=[1, 1, 1, 1]),
            node("Relu", [f"m{i}.conv1"], [f"m{i}.relu1"]),
            node("MaxPool", [f"m{i}.relu1"], [f"m{i}.pooled"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Flatten", [f"m{i}.pooled"], [f"m{i}.flat"]),
            node("Gemm", [f"m{i}.flat", f"m{i}.8.weight", f"m{i}.8.bias"], [f"m{i}.scores"], transB=1),
            node("Softmax", [f"m{i}.scores"], [f"m{i}.probabilities"]),
            node("Reshape", [f"m{i}.probabilities", "by_move"], [f"m{i}.by_move"]),
            node("ReduceMean", [f"m{i}.by_move", "over_moves"], [f"m{i}.mean"], keepdims=0),
        ]
    return [*nodes, node("Mean", [f"m{i}.mean" for i in range(len(members))], ["PROBS"])], weights


def _weights(classifier: nn.Module, prefix: str) -> dict[str, NDArray[Any]]:
    layers: Any = classifier.layers
    return {prefix + name: value.detach().numpy() for name, value in layers.state_dict().items()}


def _save(path: Path, nodes: list[NodeProto], weights: dict[str, NDArray[Any]]) -> None:
    """``path`` holds a network of PIXELS ``[batch, 1, 8, 8]`` to LABEL ``[batch, 1]`` and PROBS ``[batch, 10]``."""
    save_graph(
        path,
        [*nodes, helper.make_node("ArgMax", ["PROBS"], ["LABEL"], axis=1)],
        inputs=[tensor("PIXELS", TensorProto.FLOAT, "batch", 1, 8, 8)],
        outputs=[tensor("LABEL", TensorProto.INT64, "batch", 1), tensor("PROBS", TensorProto.FLOAT, "batch", 10)],
        weights=weights | {"brightest": np.float32(BRIGHTEST)},
    )


def _probabilities(model: Path, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    probabilities: NDArray[np.float32] = session.run(["PROBS"], {"PIXELS": to_pixels(images)})[0]
    return probabilities
