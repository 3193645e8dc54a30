"""``label_filename`` of outputs: names of their classes."""

from pathlib import Path

from weft_protos.model_config_pb2 import ModelConfig
from weft_serving.config.checks import is_inside
from weft_serving.config.report import Report


def read_labels(config: ModelConfig, directory: Path, version: int, report: Report) -> dict[str, tuple[str, ...]]:
    """Output -> labels, one a line of its file in the model's folder or else in the version's.

    Args:
        config: Names the files.
        directory: Of the model.
        version: To be served.
        report: Receives what cannot be read.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for i, output in enumerate(config.output):
        filename = output.label_filename
        if not filename or not is_inside(filename):
            continue  # the latter is reported with the other file names
        path = next((p for p in (directory / filename, directory / str(version) / filename) if p.exists()), None)
        try:
            if path is None:
                raise FileNotFoundError(2, "there is no such file in the model's folder or in its version's")
            labels[output.name] = tuple(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            report.error(f"output[{i}].label_filename", f"cannot read labels '{filename}': {reason}")
    return labels
