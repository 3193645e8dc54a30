"""A catalog of models, and other graphs, that the graph files beside this one may name."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from weft.base.signature import ModelSignature, TensorSpec
from weft.language import GraphSource

FOLDER = Path(__file__).parent

#: Model: (max_batch_size, inputs, outputs); a tensor is NAME:DATATYPE:DIMS, NAME? where it is optional.
MODELS = {
    "lang_id": (64, "TEXT:BYTES:1", "LANG:BYTES:1"),
    "longformer": (64, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "bert_de": (64, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "bert_en": (64, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "xlmr": (64, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "wide": (64, "TEXT:BYTES:1", "PROBS:FP32:4"),
    "half": (64, "TEXT:BYTES:1", "PROBS:FP16:3"),
    "small": (4, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "single": (0, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "tracker": (64, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "stream": (64, "TEXT:BYTES:1", "PROBS:FP32:3"),
    "stream_words": (64, "TEXT:BYTES:1", "WORDS:FP32:3"),
    "stream_talk": (0, "TEXT:BYTES:1", "SAID:BYTES:1 IDS:INT32:-1"),
    "bytes": (64, "TEXT:BYTES:1", "BYTE:UINT8:1"),
    "boxes": (64, "TEXT:BYTES:1", "BOXES:FP32:-1,4"),
    "add": (64, "A:FP32:3 B:FP32:3", "SUM:FP32:3"),
    "merge": (64, "LEFT:FP32:-1,3 RIGHT:FP32:-1,3", "OUT:FP32:3"),
    "judge": (64, "PROBS:FP32:-1,3 MASK:BOOL:-1 TEXT:BYTES:1", "VERDICT:FP32:3"),
    "context": (64, "TEXT:BYTES:1 HINT?:FP32:4", "PROBS:FP32:3"),
    "hinted": (64, "TEXT:BYTES:1 HINT:FP32:4", "PROBS:FP32:3"),
    "format_label": (64, "P:FP32:3", "LABEL:BYTES:1"),
    "decode_resize": (64, "JPEG:BYTES:1", "OUT:FP32:3,224,224"),
    "resnet50": (64, "X:FP32:3,224,224", "PROBS:FP32:1000"),
    "convnext": (64, "X:FP32:3,224,224", "PROBS:FP32:1000"),
    "vit_next": (64, "X:FP32:3,-1,-1", "PROBS:FP32:1000"),
    "xgb": (64, "FEATURES:FP32:40", "LABEL:INT64:1 SCORE:FP32:1"),
    "mlp": (64, "FEATURES:FP32:40", "LABEL:INT64:1 SCORE:FP32:1"),
    "gnn": (64, "FEATURES:FP32:40 GRAPH_EMB:FP32:128", "LABEL:INT64:1 PROB:FP32:1"),
    "named": (64, "FEATURES:FP32:40", "LABEL:BYTES:1 SCORE:FP32:2"),
    "verbose": (64, "TEXT:BYTES:1", "PROBS:FP32:3 LOGITS:FP32:3 SURE:BOOL:1"),
    "sure": (64, "TEXT:BYTES:1", "PROBS:FP32:3 SURE:BOOL:1"),
    "improve": (64, "DRAFT:FP32:3", "BETTER:FP32:3 DONE:BOOL:1"),
    "unsure": (64, "TEXT:BYTES:1", "PROBS:FP32:3 HINT?:FP32:4"),
    "distil": (64, "TEXT:BYTES:1", "PROBS:FP32:4"),
    "bert": (64, "TEXT:BYTES:1", "PROBS:FP32:4"),
    "llama_guard": (64, "TEXT:BYTES:1", "PROBS:FP32:4"),
}


def _specs(text: str) -> tuple[TensorSpec, ...]:
    fields = [item.split(":") for item in text.split()]
    return tuple(
        TensorSpec(
            name.removesuffix("?"), datatype, tuple(map(int, dims.split(",") if dims else ())), name.endswith("?")
        )
        for name, datatype, dims in fields
    )


class FakeCatalog:
    """Every model of ``MODELS`` and some ``more``, in versions 1 and 3, on one target."""

    def __init__(self, more: Mapping[str, tuple[int, str, str]] | None = None) -> None:
        self._models = {**MODELS, **(more or {})}

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """As ``Catalog.find``."""
        if model_name not in self._models or version not in ("", "1", "3"):
            return None
        max_batch_size, inputs, outputs = self._models[model_name]
        is_decoupled = model_name.startswith("stream")
        signature = ModelSignature(
            model_name,
            version or "3",
            "fake",
            max_batch_size,
            _specs(inputs),
            _specs(outputs),
            is_decoupled,
            is_stateful=model_name == "tracker",
        )
        return "model", signature

    def names(self) -> list[str]:
        """As ``Catalog.names``."""
        return list(self._models)


class FolderGraphs:
    """The graphs of ``others/``, each in version 7."""

    def find(self, name: str, version: str) -> GraphSource | None:
        """As ``GraphLookup.find``."""
        file = FOLDER / "others" / f"{name}.pbtxt"
        if version not in ("", "7") or not file.is_file():
            return None
        return GraphSource(file.read_text(), file.name, name, "7")

    def names(self) -> list[str]:
        """As ``GraphLookup.names``."""
        return sorted(file.stem for file in (FOLDER / "others").glob("*.pbtxt"))


@pytest.fixture
def catalog() -> FakeCatalog:
    """The models."""
    return FakeCatalog()


@pytest.fixture
def graphs() -> FolderGraphs:
    """The other graphs."""
    return FolderGraphs()


#: Head of a batching graph from TEXT to PROBS.
HEAD = """name: "g" max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


def with_head(text: str) -> str:
    """The text, behind HEAD where it begins with a node."""
    return HEAD + text if text.startswith("node") else text
