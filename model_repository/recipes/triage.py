"""``triage``: which team a support message is for, without training, and the nearest of that team's answers.

Zero-shot classification with sentence embeddings: a label is the mean embedding of a few descriptions of it, and a
message gets the label with the largest cosine. The descriptions were chosen by the messages under ``tuning``; those
under ``held_out`` were written before, and not used to choose.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from recipes.catalog import (
    TEAMS,
    TRIAGE_DESCRIPTIONS,
    TRIAGE_MESSAGES,
    TRIAGE_MODEL,
    TRIAGE_QUESTIONS,
    TRIAGE_TABLES,
)
from recipes.encoder import Encoder, unit_rows
from recipes.onnx_file import save_graph, tensor
from recipes.recipe import Figures

_SCALE = 20.0  # cosines with the labels lie within about 0 to 0.7; times 20 their softmax is neither flat nor 0 or 1
_LEAST_ACCURACY = 0.9


def build(repository: Path, stage: Path) -> Figures:
    """The label model and the table of each team are written.

    Returns:
        Share of messages that get the right team, and of held-out ones that get the right one of their team's answers.

    Raises:
        ValueError: Fewer held-out messages get the right team than should.
    """
    encoder = Encoder(repository)
    descriptions, messages = _read(repository / TRIAGE_DESCRIPTIONS), _read(repository / TRIAGE_MESSAGES)
    labels = _means(encoder, [descriptions[team] for team in TEAMS])
    _save_label_model(stage / TRIAGE_MODEL, labels)
    tables = {team: _means(encoder, _read(repository / TRIAGE_QUESTIONS[team])) for team in TEAMS}
    for team, table in tables.items():
        save_file({"embeddings": table}, stage / TRIAGE_TABLES[team])

    team_hits: dict[str, list[bool]] = {"held_out": [], "tuning": []}
    answer_hits = []
    for part, hits in team_hits.items():
        for i, team in enumerate(TEAMS):
            for message in messages[part][team]:
                embedding = encoder.embed([message["text"]])[0]
                hits.append(int((labels @ embedding).argmax()) == i)
                if part == "held_out":
                    answer_hits.append(int((tables[team] @ embedding).argmax()) == message["answer"])
    figures = {
        "held-out teams": float(np.mean(team_hits["held_out"])),
        "tuning teams": float(np.mean(team_hits["tuning"])),
        "held-out answers": float(np.mean(answer_hits)),
    }
    if figures["held-out teams"] < _LEAST_ACCURACY:
        raise ValueError(f"{figures}: at least {_LEAST_ACCURACY} of the held-out messages must get the right team")
    return figures


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _means(encoder: Encoder, groups: list[list[str]]) -> NDArray[np.float32]:
    """The mean embedding of each group of texts, scaled to length 1; shape ``[len(groups), 384]``."""
    return unit_rows(np.stack([encoder.embed(texts).mean(axis=0) for texts in groups]))


def _save_label_model(path: Path, labels: NDArray[np.float32]) -> None:
    """``SCORES = 20 * EMBEDDING @ labels^T``: all embeddings have length 1, so that the product is the cosine."""
    save_graph(
        path,
        [helper.make_node("MatMul", ["EMBEDDING", "labels"], ["SCORES"])],
        inputs=[tensor("EMBEDDING", TensorProto.FLOAT, "batch", labels.shape[1])],
        outputs=[tensor("SCORES", TensorProto.FLOAT, "batch", labels.shape[0])],
        weights={"labels": labels.T * np.float32(_SCALE)},
    )
