"""Models without a configuration, or with a part of one: what their files say is what they serve."""

from pathlib import Path

import torch
from tests.case_files import cases
from tests.unit.backends.files import without_library, write_files

from weft.backends import BACKENDS, postprocess, preprocess
from weft.base.errors import WeftError
from weft.serving.backends.base import InstanceContext
from weft.serving.config import define_model

PYTHON = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return []
"""


class Scores(torch.nn.Module):
    """A dict of two tensors for two inputs."""

    def forward(self, pixels, mask):
        return {"scores": pixels * mask, "best": pixels.argmax(dim=1)}


class Sum(torch.nn.Module):
    """One tensor."""

    def forward(self, x):
        return x.sum(dim=1, keepdim=True)


def write_pt2(folder, module, *arguments, limit=None):
    """A program with a first dimension of any size, up to a limit."""
    batch = {0: torch.export.Dim("batch", max=limit) if limit else torch.export.Dim("batch")}
    program = torch.export.export(module, arguments, dynamic_shapes=(batch,) * len(arguments))
    torch.export.save(program, folder / "model.pt2")


def defined(folder, text=None, **options):
    """The configuration of the model whose version folder this is."""
    if text is not None:
        (folder.parent / "config.pbtxt").write_text(text)
    return define_model(folder.parent, [1], BACKENDS, num_gpus=0, **options).config


def shown(tensors):
    """Name, type and dims of each, and the reshape where there is one."""
    rows = []
    for tensor in tensors:
        reshape = [list(tensor.reshape.shape)] if tensor.HasField("reshape") else []
        rows.append((tensor.name, tensor.data_type, list(tensor.dims), *reshape))
    return rows


@cases(Path(__file__).parent / "definitions.txt")
def test_definition(version_folder, case):
    """A model is completed by its files as the case says, or refused, with the place that is wrong."""
    folder, names = version_folder.parent, dict(case.options)
    write_files(folder, case.options)
    if "override" not in names and "without" not in names:
        (folder / "config.pbtxt").write_text(case.text)
    options = {"override": case.text} if "override" in names else {"completes": "complete" not in names}
    backends = {**BACKENDS, **preprocess.BACKENDS, **postprocess.BACKENDS}
    try:
        definition = define_model(folder, [1], backends, num_gpus=0, **options)
        if "load" in names:
            definition.backend(definition.contexts[1], InstanceContext("model_0_0")).load()
    except WeftError as error:
        case.check(without_library(error.message.replace(str(folder), "model")))
        return
    config = definition.config
    head = f"{config.name}, {config.backend}, {config.platform}, {config.default_model_filename or 'no file'}"
    batches = " in dynamic batches" if config.HasField("dynamic_batching") else " at most"
    tensors = [f"{kind} {each}" for kind in ("input", "output") for each in shown(getattr(config, kind))]
    case.check("\n".join([head, f"{config.max_batch_size} rows{batches}", *tensors]))


def test_an_exported_program_is_a_model(version_folder):
    """Names are those of the arguments and of the keys of the result."""
    write_pt2(version_folder, Scores(), torch.ones(2, 5), torch.ones(2, 5))
    config = defined(version_folder)
    assert ("pytorch", "pytorch_libtorch", 4) == (config.backend, config.platform, config.max_batch_size)
    assert [("pixels", 11, [5]), ("mask", 11, [5])] == shown(config.input)
    assert [("scores", 11, [5]), ("best", 9, [1], [])] == shown(config.output)


def test_results_without_names_are_numbered(version_folder):
    """As in Triton Inference Server; and no batch is larger than the program takes."""
    write_pt2(version_folder, Sum(), torch.ones(2, 5), limit=3)
    config = defined(version_folder)
    assert (3, [("x", 11, [5])], [("OUTPUT__0", 11, [1])]) == (
        config.max_batch_size, shown(config.input), shown(config.output),
    )  # fmt: skip


def test_a_python_file_is_a_model(version_folder):
    """Without config.pbtxt its ``auto_complete_config`` says everything."""
    (version_folder / "model.py").write_text(PYTHON)
    config = defined(version_folder)
    assert ("python", "", 8, [("X", 11, [4])], [("Y", 13, [1])]) == (
        config.backend, config.platform, config.max_batch_size, shown(config.input), shown(config.output),
    )  # fmt: skip
