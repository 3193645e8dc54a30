"""``label_filename`` of outputs: names of their classes."""

from pathlib import Path

from weft.base.errors import NotFoundError
from weft.serving.backends.labels import read_label_file
from weft.serving.config.checks import path_fault
from weft.serving.config.report import ConfigReport
from weft_protos.model_config_pb2 import ModelConfig


def read_labels(config: ModelConfig, directory: Path, version: int, report: ConfigReport) -> dict[str, tuple[str, ...]]:
    """Labels by output: the lines of its file in the model's folder, or else in the version's.

    Args:
        config: Names the files.
        directory: Of the model.
        version: To be served.
        report: Receives the faults.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for i, output in enumerate(config.output):
        filename = output.label_filename
        if not filename or path_fault(filename, ""):
            continue  # the latter is reported with the other file names
        try:
            _, lines = read_label_file(directory / str(version), filename)
            labels[output.name] = tuple(line.decode() for line in lines)
            continue
        except NotFoundError:
            reason = f"there is no such file in {directory} or in its folder '{version}'"
        except UnicodeDecodeError:
            reason = "it is not UTF-8"
        except OSError as error:
            reason = error.strerror or str(error)
        report.error(f"output[{i}].label_filename", f"cannot read labels '{filename}': {reason}")
    return labels
