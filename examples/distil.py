"""A small classifier that learns a large graph's answers, and a cascade of both: ``python examples/distil.py DIR``.

``weft batch`` lets the teacher label pictures, scikit-learn fits the student to these labels, its weights become an
ONNX model beside the teacher, and a graph asks the teacher only for what the student is unsure of. Held-out pictures
tell how often each of them agrees with the teacher and is right, and what it costs. DIR is a model repository
afterwards: ``weft up --repository DIR``.
"""

import argparse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

from weft.base.processes.process import Endpoint
from weft.cli.__main__ import main as weft
from weft.mesh.running import running_mesh

SAMPLES = Path(__file__).resolve().parents[1] / "model_repository"
TEACHER, STUDENT, CASCADE = "teacher", "student", "distilled"
#: Where the student's answer stands it agrees with the teacher this often, on pictures that it has not learnt from.
MIN_AGREEMENT = 0.995
_BRIGHTEST = 16.0
#: The student learns from each picture as it is and moved by a pixel; rows and columns.
_MOVES = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
_NUM_HIDDEN = 128

_TENSORS = """max_batch_size: 32
input [ { name: "PIXELS" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] } ]
output [ { name: "LABEL" data_type: TYPE_INT64 dims: [ 1 ] }, { name: "PROBS" data_type: TYPE_FP32 dims: [ 10 ] } ]
"""
_TEACHER_NODE = 'sequence { step { name: "teacher" model_name: "digits_committee" } }'
_CASCADE_NODE = """cascade {
    per_row: true
    step { name: "student" model_name: "student" accept: 'max(outputs.PROBS) >= %.3f' }
    step { name: "teacher" model_name: "digits_committee" }
  }"""

Array = NDArray[Any]


class Figures(NamedTuple):
    """What one way of answering comes to on held-out pictures.

    Attributes:
        agreement: Share of the pictures with the teacher's label.
        accuracy: Share of the pictures with the right label.
        cpu_ms: CPU time of the mesh for a thousand pictures.
    """

    agreement: float
    accuracy: float
    cpu_ms: float


class Distilled(NamedTuple):
    """What came of it.

    Attributes:
        figures: Of teacher, student and cascade.
        threshold: Probability from which on the student's answer stands.
        share_of_teacher: Share of the held-out pictures that go on to the teacher.
    """

    figures: dict[str, Figures]
    threshold: float
    share_of_teacher: float


def distil(repository: Path, num_repeats: int = 4) -> Distilled:
    """Write teacher, student and cascade into a new repository, and measure them.

    Args:
        repository: Its folder, which must not exist.
        num_repeats: How often the held-out pictures are sent; more give a steadier figure of what they cost.

    Raises:
        RuntimeError: A command of Weft has failed; it says why on standard error.
        OSError: A file cannot be read or written.
    """
    work = repository / ".work"
    work.mkdir(parents=True)
    (repository / "model").mkdir()
    (repository / "model/digits_committee").symlink_to(SAMPLES / "model/digits_committee", target_is_directory=True)
    _write_graph(repository, TEACHER, _TEACHER_NODE)
    pictures = _moved(_pictures("model/digits_forest/1/training.npz")[0])
    with running_mesh(repository, ["--in-process"]) as mesh:
        labels = _answers(TEACHER, pictures, work / "labels", mesh["router"])
    num_fitted = len(pictures) * 4 // 5
    student = MLPClassifier((_NUM_HIDDEN,), tol=3e-3, random_state=0)
    with threadpool_limits(1):  # of so small a network more threads spend more than they save
        student.fit(_flat(pictures[:num_fitted]), labels[:num_fitted])
    threshold = _threshold(student.predict_proba(_flat(pictures[num_fitted:])), labels[num_fitted:])
    _write_student(repository, student)
    _write_graph(repository, CASCADE, _CASCADE_NODE % threshold)
    _weft("check", str(repository))
    held_out, truth = _pictures("data/digits/held_out.npz")
    repeated = np.tile(held_out, (num_repeats, 1, 1, 1))
    answers: dict[str, tuple[Array, float]] = {}
    with running_mesh(repository, ["--in-process"]) as mesh:
        for name in (TEACHER, STUDENT, CASCADE):
            before_s = _cpu_s(mesh["router"])
            own = _answers(name, repeated, work / name, mesh["router"])[: len(held_out)]
            answers[name] = own, (_cpu_s(mesh["router"]) - before_s) * 1e6 / len(repeated)
    figures = {
        name: Figures(float((own == answers[TEACHER][0]).mean()), float((own == truth).mean()), cpu_ms)
        for name, (own, cpu_ms) in answers.items()
    }
    is_unsure = student.predict_proba(_flat(held_out)).max(axis=1) < threshold
    return Distilled(figures, threshold, float(is_unsure.mean()))


def _pictures(path: str) -> tuple[Array, Array]:
    """Pictures as the teacher takes them, FP32 ``[n, 1, 8, 8]`` from 0 to 16, and their digits ``[n]``."""
    data = np.load(SAMPLES / path)
    return data["images"].astype(np.float32)[:, None] * np.float32(_BRIGHTEST / 255), data["labels"]


def _moved(pictures: Array) -> Array:
    """Each picture as often as there are moves; those of one stay together."""
    return np.stack([np.roll(pictures, move, axis=(2, 3)) for move in _MOVES], axis=1).reshape(-1, 1, 8, 8)


def _flat(pictures: Array) -> Array:
    return pictures.reshape(len(pictures), -1) / np.float32(_BRIGHTEST)


def _answers(graph: str, pictures: Array, work: Path, router: Endpoint) -> Array:
    """Labels of pictures, int64 ``[n]``, by a job of ``weft batch``."""
    data = work.with_suffix(".parquet")
    pq.write_table(pa.table({"PIXELS": pictures.tolist()}, schema=pa.schema([("PIXELS", _nested(pa.float32()))])), data)
    _weft("batch", graph, "--input", str(data), "--output", str(work), "--write", "LABEL", "--url", router.grpc)
    labels: Array = pq.read_table(work / "rows")["LABEL"].to_numpy()
    return labels


def _nested(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.list_(pa.list_(element)))


def _weft(*arguments: str) -> None:
    if weft(arguments) != 0:
        raise RuntimeError(f"weft {' '.join(arguments)}")


def _cpu_s(router: Endpoint) -> float:
    """CPU time of the mesh, which is one process."""
    with urllib.request.urlopen(f"http://{router.metrics}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("process_cpu_seconds_total")))


def _threshold(probabilities: Array, labels: Array) -> float:
    """The least probability, in thousandths, from which on the student agrees as often as it must."""
    is_right, is_sure = probabilities.argmax(axis=1) == labels, probabilities.max(axis=1)
    return next((step / 1000 for step in range(1000) if is_right[is_sure >= step / 1000].mean() >= MIN_AGREEMENT), 1.0)


def _write_graph(repository: Path, name: str, root: str) -> None:
    path = repository / "graphs" / name / "1/graph.pbtxt"
    path.parent.mkdir(parents=True)
    path.write_text(f'name: "{name}"\nplatform: "graph"\n{_TENSORS}node {{\n  name: "root"\n  {root}\n}}\n')


def _write_student(repository: Path, student: MLPClassifier) -> None:
    """The network as standard operators: two layers, a softmax, and the likeliest digit."""
    folder = repository / "model" / STUDENT
    (folder / "1").mkdir(parents=True)
    settings = 'backend: "onnxruntime"\ninstance_group [ { count: 1 kind: KIND_CPU } ]\ndynamic_batching { }\n'
    (folder / "config.pbtxt").write_text(
        f'# Distilled from the graph {TEACHER}.\nname: "{STUDENT}"\n{_TENSORS}{settings}'
    )
    weights = {"brightest": np.float32(_BRIGHTEST)}
    weights |= {f"w{i}": each.astype(np.float32) for i, each in enumerate(student.coefs_)}
    weights |= {f"b{i}": each.astype(np.float32) for i, each in enumerate(student.intercepts_)}
    node: Callable[..., onnx.NodeProto] = helper.make_node
    nodes = [
        node("Div", ["PIXELS", "brightest"], ["scaled"]),
        node("Flatten", ["scaled"], ["flat"]),
        node("Gemm", ["flat", "w0", "b0"], ["hidden"]),
        node("Relu", ["hidden"], ["active"]),
        node("Gemm", ["active", "w1", "b1"], ["scores"]),
        node("Softmax", ["scores"], ["PROBS"]),
        node("ArgMax", ["PROBS"], ["LABEL"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        STUDENT,
        [helper.make_tensor_value_info("PIXELS", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [
            helper.make_tensor_value_info("LABEL", TensorProto.INT64, ["batch", 1]),
            helper.make_tensor_value_info("PROBS", TensorProto.FLOAT, ["batch", 10]),
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "1/model.onnx")


def main() -> None:
    """Print one line for each way of answering."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repository", type=Path, metavar="DIR", help="folder for the repository; must not exist")
    repository = parser.parse_args().repository
    if repository.exists():
        parser.error(f"{repository} exists; name a folder that does not")
    distilled = distil(repository)
    print(f"{'':10}{'agrees with teacher':>20}{'right':>9}{'CPU ms per 1000':>17}")
    for name, figures in distilled.figures.items():
        print(f"{name:10}{figures.agreement:>20.1%}{figures.accuracy:>9.1%}{figures.cpu_ms:>17.0f}")
    share = distilled.share_of_teacher
    print(f"below {distilled.threshold:.3f} the student asks the teacher: {share:.1%} of the pictures")


if __name__ == "__main__":
    main()
