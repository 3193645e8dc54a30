"""ResNet-50 with random weights as a model repository: what it costs is that of a trained one."""

import json
import warnings
from pathlib import Path

import numpy as np

_SEED = 0
_SIZE = 224
_CONFIG = """\
name: "resnet50"
backend: "onnxruntime"
max_batch_size: 4
input [ { name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
output [ { name: "SCORES" data_type: TYPE_FP32 dims: [ 1000 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def write_resnet(repository: Path) -> None:
    """``model/resnet50`` (He et al., 2015, https://arxiv.org/abs/1512.03385) as transformers has it, 25.6 M weights."""
    import torch  # noqa: PLC0415  # seconds
    import transformers  # noqa: PLC0415

    folder = repository / "model" / "resnet50" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(_CONFIG)
    torch.manual_seed(_SEED)
    config = transformers.ResNetConfig(num_labels=1000)
    model = transformers.ResNetForImageClassification(config).eval()

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.model(pixels).logits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter without dynamo is the one that folds batch norms
        torch.onnx.export(
            Scores(),
            (torch.zeros(1, 3, _SIZE, _SIZE),),
            str(folder / "model.onnx"),
            dynamo=False,
            input_names=["PIXELS"],
            output_names=["SCORES"],
            dynamic_axes={"PIXELS": {0: "batch"}, "SCORES": {0: "batch"}},
        )


def write_pictures(path: Path, count: int) -> None:
    """Noise that is smooth over 16 pixels, as JSON Lines with ``PIXELS``."""
    draw = np.random.default_rng(_SEED)
    with path.open("w") as lines:
        for _ in range(count):
            coarse = draw.normal(size=(3, _SIZE // 16, _SIZE // 16)).astype(np.float32)
            lines.write(json.dumps({"PIXELS": np.round(np.kron(coarse, np.ones((16, 16))), 2).tolist()}) + "\n")
