"""Triton: programs that call models from within a model, as graphs."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from tests.compat.graphs.shape import Arrays, Given, Model, Request, Shape, floats, integers, texts
from tests.compat.graphs.triton_language import TOKENIZE_ONLY

_TUTORIALS = "triton-inference-server/tutorials"
_PYTHON = "triton-inference-server/python_backend: examples"
_DALI = "triton-inference-server/dali_backend"
_FOUR, _ONES = floats(1, 2, 3, 4), np.ones(4, np.float32)
_ADD_SUB = Model(
    "add_sub",
    "A:FP32:4 B:FP32:4",
    "SUM:FP32:4 DIFF:FP32:4",
    lambda x: {"SUM": x["A"] + x["B"], "DIFF": x["A"] - x["B"]},
)
_TENFOLD = replace(
    _ADD_SUB, name="torch", answer=lambda x: {"SUM": 10 * (x["A"] + x["B"]), "DIFF": 10 * (x["A"] - x["B"])}
)


def _unet(x: Given) -> Arrays:
    """A hundredth of what is left between the noise and the text goes away in each round."""
    number = x.get("round", integers([0]))
    return {"cleaner": x["latents"] + (x["text"] - x["latents"]) / 100, "next": number + 1}


def _chat(x: Given) -> Iterator[Arrays]:
    for index in range(int(x["length"][0, 0])):
        yield {"output_ids": x["ids"][:, index : index + 1] + x["table"].astype(np.int32)}


SHAPES = [
    Shape(
        "triton/guides/chosen_by_name.pbtxt",
        f"{_PYTHON}/bls (sync)",
        [_ADD_SUB, _TENFOLD],
        [
            Request(
                {"MODEL_NAME": texts("torch"), "A": _FOUR, "B": _ONES},
                {"SUM": 10 * (_FOUR + 1), "DIFF": 10 * (_FOUR - 1)},
            ),
            Request({"MODEL_NAME": texts("add_sub"), "A": _FOUR, "B": _ONES}, {"SUM": _FOUR + 1, "DIFF": _FOUR - 1}),
            Request({"MODEL_NAME": texts("nobody"), "A": _FOUR, "B": _ONES}, error="INVALID_ARGUMENT"),
        ],
    ),
    Shape(
        "triton/guides/two_at_once.pbtxt",
        f"{_PYTHON}/bls (async)",
        [_ADD_SUB, _TENFOLD],
        [Request({"A": _FOUR, "B": _ONES}, {"SUM": 10 * (_FOUR + 1), "DIFF": _FOUR - 1})],
    ),
    Shape(
        "triton/guides/diffusion.pbtxt",
        f"{_TUTORIALS}: Conceptual_Guide/Part_6-building_complex_pipelines",
        [
            Model("text_encoder", "prompt:BYTES:1", "hidden:FP32:2", lambda x: {"hidden": floats([1, -1])}, 1),
            Model(
                "noise",
                "prompt:BYTES:1",
                "latents:FP32:2 round:INT32:1",
                lambda x: {"latents": floats([0, 0]), "round": integers([0])},
                1,
            ),
            Model("unet", "text:FP32:2 latents:FP32:2 round:INT32:1", "cleaner:FP32:2 next:INT32:1", _unet, 1),
            Model(
                "vae",
                "latents:FP32:2",
                "picture:UINT8:4,4,3",
                lambda x: {"picture": np.full((1, 4, 4, 3), round(255 * float(x["latents"][0, 0])), np.uint8)},
                1,
            ),
        ],
        [
            Request(
                {"prompt": texts(["a cat"])},
                {"picture": np.full((1, 4, 4, 3), round(255 * (1 - 0.99**50)), np.uint8)},
                called=["text_encoder", "noise", *["unet"] * 50, "vae"],
            )
        ],
    ),
    Shape(
        "triton/guides/segmentation.pbtxt",
        f"{_DALI}: docs/examples/segmentation/model_repository/segmentation_bls",
        [
            Model(
                "before",
                "encoded:UINT8:-1",
                "original:UINT8:-1,-1,3 preprocessed:FP32:2",
                lambda x: {
                    "original": np.ones((1, 2, 3, 3), np.uint8) * x["encoded"][0, 0],
                    "preprocessed": x["encoded"][:, :2].astype(np.float32),
                },
                4,
            ),
            Model("resnet", "input:FP32:2", "probabilities:FP32:2", lambda x: {"probabilities": x["input"] / 10}, 4),
            Model(
                "after",
                "picture:UINT8:-1,-1,3 probabilities:FP32:2",
                "segmented:UINT8:-1,-1,3",
                lambda x: {"segmented": (x["picture"] * (x["probabilities"][0, 1] > 0.5)).astype(np.uint8)},
                4,
            ),
        ],
        [
            Request(
                {"encoded": np.array([[7, seen]], np.uint8)},
                {
                    "original": np.full((1, 2, 3, 3), 7, np.uint8),
                    "segmented": np.full((1, 2, 3, 3), 7 if seen > 5 else 0, np.uint8),
                },
            )
            for seen in (9, 2)
        ],
    ),
    Shape(
        "triton/guides/picture_chat.pbtxt",
        f"{_TUTORIALS}: Popular_Models_Guide/Llava1.5",
        [
            Model(
                "vision_encoder",
                "image:BYTES:1",
                "features:FP16:1",
                lambda x: {"features": np.ones((1, 1), np.float16)},
                1,
            ),
            Model(
                "settings",
                "max_tokens?:INT32:1",
                "length:INT32:1",
                lambda x: {"length": x.get("max_tokens", integers([3]))},
                1,
            ),
            TOKENIZE_ONLY,
            Model(
                "llm",
                "ids:INT32:-1 table:FP16:1 length:INT32:1",
                "output_ids:INT32:1",
                _chat,
                1,
                is_decoupled=True,
            ),
            Model("spell", "ids:INT32:1", "text:BYTES:1", lambda x: {"text": texts([chr(x["ids"][0, 0])])}, 1),
        ],
        [
            Request({"image": texts(["cat"]), "prompt": texts(["abcd"])}, [{"text": texts([one])} for one in "bcd"]),
            Request(
                {"image": texts(["cat"]), "prompt": texts(["abcd"]), "max_tokens": integers([1])},
                [{"text": texts(["b"])}],
            ),
        ],
    ),
]
