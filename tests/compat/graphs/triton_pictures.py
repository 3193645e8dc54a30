"""Triton: pictures and other plain ensembles of guides, tutorials and backends."""

import numpy as np
from tests.compat.graphs.shape import Arrays, Given, Model, Request, Shape, floats, integers, texts

_SERVER = "triton-inference-server/server"
_TUTORIALS = "triton-inference-server/tutorials"
_PYTHON = "triton-inference-server/python_backend: examples"
_DALI = "triton-inference-server/dali_backend"


def _bytes_of(x: np.ndarray) -> np.ndarray:
    """Length of each text, one row each."""
    return np.vectorize(len, otypes=[np.float32])(x)


_PREPARE = Model(
    "prepare",
    "IN_0:UINT8:-1",
    "OUT_0:FP32:3,4,4",
    lambda x: {"OUT_0": np.ones((1, 3, 4, 4), np.float32) * x["IN_0"].astype(np.float32).mean(1)[:, None, None, None]},
    256,
)


def _classes(x: np.ndarray) -> np.ndarray:
    return x.sum((1, 2, 3))[:, None] * np.arange(10, dtype=np.float32)


_RAW = np.array([[1, 2, 3, 4, 5], [10, 10, 10, 10, 10]], np.uint8)
#: 48 pixels of the mean of each row, times the class.
_CLASSES = np.array([[48 * 3.0], [48 * 10.0]], np.float32) * np.arange(10, dtype=np.float32)
_PICTURES = [
    Shape(
        "triton/guides/picture_two_heads.pbtxt",
        f"{_SERVER}: docs/user_guide/ensemble_models.md",
        [
            Model(
                "prepare",
                "RAW:BYTES:1",
                "READY:FP32:3,4,4",
                lambda x: {"READY": np.ones((1, 3, 4, 4), np.float32) * _bytes_of(x["RAW"])[:, :, None, None]},
                1,
            ),
            Model("classify", "IN:FP32:3,4,4", "OUT:FP32:10", lambda x: {"OUT": _classes(x["IN"])}, 8),
            Model("segment", "IN:FP32:3,4,4", "OUT:FP32:3,4,4", lambda x: {"OUT": -x["IN"]}, 8),
        ],
        [
            Request(
                {"IMAGE": texts(["12345"])},
                {
                    "CLASSES": np.float32(48 * 5) * np.arange(10, dtype=np.float32)[None],
                    "MASK": np.full((1, 3, 4, 4), -5, np.float32),
                },
            ),
            Request(
                {"IMAGE": texts(["12345"])},
                {"MASK": np.full((1, 3, 4, 4), -5, np.float32)},
                outputs=("MASK",),
                called=["prepare", "segment"],
            ),
        ],
    ),
    Shape(
        "triton/guides/picture_one_head.pbtxt",
        f"{_PYTHON}/preprocessing, {_DALI}: docs/examples/resnet50_trt, "
        f"{_DALI}: docs/examples/efficientnet (cpu, gpu), "
        f"{_SERVER}: docs/examples (preprocess and Inception, as of client: src/python/examples/ensemble_image_client)",
        [
            _PREPARE,
            Model("classify", "input:FP32:3,4,4", "output:FP32:10", lambda x: {"output": _classes(x["input"])}, 256),
        ],
        [Request({"RAW": _RAW}, {"OUT": _CLASSES})],
    ),
    Shape(
        "triton/guides/picture_ragged.pbtxt",
        f"{_DALI}: benchmarks/BM_resnet50/model_repository/dali_trt_resnet50",
        [
            _PREPARE,
            Model(
                "classify",
                "input:FP32:3,4,4",
                "class:INT32:1 probs:FP32:10",
                lambda x: {
                    "class": _classes(x["input"]).argmax(1).astype(np.int32)[:, None],
                    "probs": _classes(x["input"]),
                },
                128,
            ),
        ],
        [Request({"RAW": _RAW}, {"class": integers([9], [9]), "probs": _CLASSES})],
    ),
]


def _crop(x: Given) -> Arrays:
    """As many crops as the first number of the picture says; the n-th of them is all n."""
    count = int(x["in_3"][0, 0, 0, 0])
    return {"crops": np.ones((count, 1, 2, 3), np.float32) * np.arange(count, dtype=np.float32)[:, None, None, None]}


_READ_TEXT = Shape(
    "triton/guides/read_text.pbtxt",
    f"{_TUTORIALS}: Conceptual_Guide/Part_5-Model_Ensembles",
    [
        Model(
            "decode",
            "raw:UINT8:-1",
            "picture:FP32:-1,-1,3",
            lambda x: {"picture": np.ones((1, 2, 2, 3), np.float32) * x["raw"][0, 0]},
            256,
        ),
        Model(
            "detect",
            "images:0:FP32:-1,-1,3",
            "net/scores/Sigmoid:0:FP32:-1,-1,1 net/boxes_3:0:FP32:-1,-1,5",
            lambda x: {
                "net/scores/Sigmoid:0": np.ones((1, 1, 1, 1), np.float32),
                "net/boxes_3:0": np.ones((1, 1, 1, 5), np.float32),
            },
            256,
        ),
        Model("crop", "in_1:FP32:-1,-1,1 in_2:FP32:-1,-1,5 in_3:FP32:-1,-1,3", "crops:FP32:-1,-1,-1", _crop, 256),
        Model("recognize", "input.1:FP32:1,2,3", "308:FP32:4,5", lambda x: {"308": _letters(x["input.1"])}, 256),
        Model(
            "spell",
            "scores:FP32:4,5",
            "text:BYTES:-1",
            lambda x: {"text": texts(*(["".join("-abcd"[i] for i in row.argmax(1))] for row in x["scores"]))},
            256,
        ),
    ],
    [
        Request({"RAW": np.array([[3, 9]], np.uint8)}, {"TEXT": texts(["----"], ["aaaa"], ["bbbb"])}),
        Request({"RAW": np.array([[1]], np.uint8)}, {"TEXT": texts(["----"])}),
    ],
)


def _letters(crops: np.ndarray) -> np.ndarray:
    """Four letters for each crop, all the one that its number says."""
    return np.repeat(np.eye(5, dtype=np.float32)[crops[:, 0, 0, 0].astype(int)][:, None], 4, axis=1)


def _rotate(x: Given) -> Arrays:
    return {"U": x["Y"] / 2, "V": x["X"] / 2}


_KINDS = {"text": "BYTES:-1", "bytes": "UINT8:-1", "signed": "INT8:-1", "image": "FP32:-1,-1,-1", "flags": "BOOL:-1"}
_FIVE = {
    "text": texts(["a", "b"]),
    "bytes": np.array([[1, 255]], np.uint8),
    "signed": np.array([[-128, 7, 0]], np.int8),
    "image": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3),
    "flags": np.array([[True, False]]),
}


def _five(name: str, suffix: str) -> Model:
    """Turns the order of each tensor's last dimension."""
    return Model(
        name,
        " ".join(f"{tensor}:{kind}" for tensor, kind in _KINDS.items()),
        " ".join(f"{tensor}{suffix}:{kind}" for tensor, kind in _KINDS.items()),
        lambda x: {f"{tensor}{suffix}": array[..., ::-1] for tensor, array in x.items()},
        8,
    )


def _lookup(x: Given) -> Arrays:
    """Of each sample the sum of its keys, and that halved."""
    parts = np.split(x["KEYS"], np.cumsum(x["COUNTS"])[:-1])
    return {"VECTORS": np.array([[part.sum(), part.sum() / 2] for part in parts], np.float32).ravel()}


_PLAIN = [
    Shape(
        "triton/guides/lookup_then_dense.pbtxt",
        "triton-inference-server/hugectr_backend: hps_backend/samples/hps-triton-ensemble (three notebooks)",
        [
            Model("lookup", "KEYS:INT64:-1 COUNTS:INT32:-1", "VECTORS:FP32:-1", _lookup),
            Model("dense", "IN:FP32:-1", "OUT:FP32:-1", lambda x: {"OUT": x["IN"].reshape(-1, 2).sum(1)}),
        ],
        [
            Request(
                {"KEYS": np.array([1, 2, 3, 4], np.int64), "COUNTS": integers(1, 3)},
                {"score": floats(1.5, 13.5)},
            )
        ],
    ),
    Shape(
        "triton/guides/two_by_two.pbtxt",
        f"{_DALI}: qa/L1_DALI_GPU_ensemble/model_repository/dali_ensemble",
        [Model("half", "X:FP32:-1 Y:FP32:-1", "U:FP32:-1 V:FP32:-1", _rotate, 256)],
        [Request({"A": floats([4, 8]), "B": floats([1])}, {"C": floats([1, 2]), "D": floats([0.25])})],
    ),
    Shape(
        "triton/guides/hidden_states.pbtxt",
        f"{_TUTORIALS}: HuggingFace/ensemble_model_repository/ensemble_model",
        [
            Model("prepare", "image:FP32:-1,-1,-1", "pixels:FP32:3,-1,-1", lambda x: {"pixels": x["image"] / 255}, 4),
            Model(
                "vit",
                "pixels:FP32:3,-1,-1",
                "last_hidden_state:FP32:-1,-1 1519:FP32:8",
                lambda x: {"last_hidden_state": x["pixels"][:, 0], "1519": np.repeat(x["pixels"][:, :1, 0, 0], 8, 1)},
                4,
            ),
        ],
        [
            Request(
                {"image": np.full((2, 3, 2, 5), 255, np.float32)},
                {"last_hidden_state": np.ones((2, 2, 5), np.float32), "1519": np.ones((2, 8), np.float32)},
            )
        ],
    ),
    Shape(
        "triton/guides/five_types.pbtxt",
        f"{_TUTORIALS}: Feature_Guide/Data_Pipelines",
        [_five("first", "_1"), _five("second", "_2")],
        [
            Request(
                {f"in_{name}": array for name, array in _FIVE.items()},
                {f"out_{name}": array for name, array in _FIVE.items()},
            )
        ],
    ),
]

SHAPES = [*_PICTURES, _READ_TEXT, *_PLAIN]
