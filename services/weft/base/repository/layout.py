"""Repository layout: version names; telling models, ensembles and folders of models apart; their files.

A ``config.pbtxt`` is recognised by its text, which may be invalid. In a repository of Triton Inference Server, models
and ensembles, which the router serves, are in the same folder.
"""

import errno
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.text.suggestion import suggestion

if TYPE_CHECKING:
    from weft_protos.model_config_pb2 import ModelVersionPolicy

_CANONICAL = re.compile(r"[1-9][0-9]{0,17}")
#: Leading zeros are ignored, as in Triton Inference Server; longer numbers are rejected.
_SENT = re.compile(r"0*[1-9][0-9]{0,17}")
#: How a pointer file begins that Git leaves where Git LFS is not installed.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_version(text: str) -> bool:
    """Whether a folder name is a version: an integer without leading zeros, as in Triton Inference Server."""
    return _CANONICAL.fullmatch(text) is not None


def is_folder_name(name: str) -> bool:
    """Whether a graph or model can have this name: its folder lies in the repository."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def version_number(version: str) -> int:
    """Parse a version sent by a client; "" is invalid.

    Raises:
        InvalidArgumentError: It is not a whole number of at least 1.
    """
    if not _SENT.fullmatch(version):
        raise InvalidArgumentError(
            f"failed to get model version from specified version string '{version[:80]}', version should be an "
            "integral value > 0"
        )
    return int(version)


def version_order(version: str) -> int:
    """Sort key of a version; text that is not a number comes first."""
    return int(version) if version.isdecimal() else -1


def versions_to_serve(policy: "ModelVersionPolicy", available: Sequence[int]) -> list[int]:
    """The available versions that ``version_policy`` selects, ascending; without a policy the highest."""
    ordered = sorted(available)
    match policy.WhichOneof("policy_choice"):
        case "all":
            return ordered
        case "specific":
            return [version for version in ordered if version in policy.specific.versions]
        case "latest":
            return ordered[-max(policy.latest.num_versions, 1) :]
        case _:
            return ordered[-1:]


CONFIG_FILENAME = "config.pbtxt"
#: Written when a model.py is imported.
BYTECODE_FOLDER = "__pycache__"

_ENSEMBLE = re.compile(r"^[ \t]*ensemble_scheduling\b|\bplatform\s*:\s*[\"'](ensemble|graph)[\"']", re.MULTILINE)
_MODEL = re.compile(r"^[ \t]*(backend|platform)\s*:", re.MULTILINE)
_NAMED = re.compile(r"(^|[\s;,])((backend|platform|default_model_filename)\s*:|ensemble_scheduling\b)")


def runs_in_router(config: Path) -> bool:
    """Whether the file declares an ensemble or a graph, which the router serves. Raises OSError."""
    return declares_graph(_text(config))


def declares_graph(text: str) -> bool:
    """Whether the text of a ``config.pbtxt`` declares an ensemble or a graph."""
    return _ENSEMBLE.search(text) is not None


def is_model(config: Path) -> bool:
    """Whether the file declares no ensemble, and names a backend or leaves it to a model's files. Raises OSError."""
    text = _text(config)
    return _ENSEMBLE.search(text) is None and (_MODEL.search(text) is not None or has_files(config.parent))


def names_backend(config: Path) -> bool:
    """Whether the file names a backend, a platform, a model file or steps. Raises OSError.

    One that does not may still be complete, if the model's files tell; or an edit has emptied or truncated it.
    """
    return _NAMED.search(_text(config)) is not None


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a model, an ensemble or a graph: it has a ``config.pbtxt`` or a version folder.

    Its name does not matter: a model may be called ``preprocess``. Raises OSError.
    """
    return folder.is_dir() and (
        (folder / CONFIG_FILENAME).exists()
        or any(is_version(entry.name) and entry.is_dir() for entry in folder.iterdir())
    )


def folders_of_models(repository: Path, names: Sequence[str]) -> dict[str, Path]:
    """The folders of these names that hold models, by name; none if models lie directly in the repository.

    Raises OSError.
    """
    found = {name: repository / name for name in names if (repository / name).is_dir()}
    return {name: folder for name, folder in found.items() if not is_model_folder(folder)}


def model_names(folder: Path) -> list[str]:
    """Names of the models in a folder, sorted; without hidden folders and ensembles, which a router serves."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir()
        and not entry.name.startswith(".")
        and entry.name != BYTECODE_FOLDER
        and not is_graph_folder(entry)
    )


def is_graph_folder(folder: Path) -> bool:
    """Whether a folder holds an ensemble or a graph, which the router serves, by files that can be read."""
    try:
        return runs_in_router(folder / CONFIG_FILENAME)
    except FileNotFoundError:
        return any(folder.glob("*/graph.pbtxt"))
    except OSError:
        return False  # its faults are reported at load


def served_folders(repository: Path, services: Sequence[str], graphs: str) -> dict[str, Path]:
    """The existing folder of each service, by name, and of the graphs, as ``graphs``.

    A repository of Triton Inference Server, with models and ensembles side by side, belongs to the model service and to
    the router. Raises NotFoundError if it is neither.
    """
    if not repository.is_dir():
        hint = suggestion(repository.name, (path.name for path in repository.parent.glob("*")))
        raise NotFoundError(f"there is no folder '{repository}'{hint}")
    folders = folders_of_models(repository, (*services, graphs))
    has_services = graphs in folders and len(folders) > 1
    if not has_services and any(map(is_model_folder, repository.iterdir())):
        return {"model": repository, graphs: repository}
    if not has_services:
        raise NotFoundError(
            f"'{repository}' is no model repository: it needs a folder '{graphs}' and at least one of "
            f"{', '.join(services)}, or models side by side as Triton Inference Server has them; give one with "
            "--repository"
        )
    return folders


def twice_named(folders: Iterable[Path]) -> dict[Path, str]:
    """Folders of models whose name is that of another before them, with what is wrong: routers call models by name."""
    first: dict[str, Path] = {}
    faults: dict[Path, str] = {}
    for folder in folders:
        for name in model_names(folder):
            if (other := first.setdefault(name, folder)) != folder:
                faults[folder / name] = (
                    f"two models are named '{name}', in {other} and in {folder}, and graphs call models by name; "
                    "rename one of the folders, or remove it"
                )
    return faults


def has_files(folder: Path) -> bool:
    """Whether any version folder of a model contains anything. Raises OSError."""
    return any(is_version(entry.name) and entry.is_dir() and any(entry.iterdir()) for entry in folder.iterdir())


def _text(config: Path) -> str:
    if config.exists() and not config.is_file():  # a pipe would be waited for
        raise OSError(errno.EINVAL, "it is no regular file", str(config))
    return config.read_text(encoding="utf-8", errors="replace")


def existing_file(directory: Path, filename: str, *, parents: Sequence[Path] = ()) -> Path:
    """Path of ``filename`` in the first folder that has it. Raises InvalidArgumentError (outside) or NotFoundError."""
    if PurePath(filename).is_absolute() or ".." in PurePath(filename).parts:
        raise InvalidArgumentError(f"file name '{filename}' leaves {directory}; give a name inside that folder")
    for folder in (directory, *parents):
        if (path := folder / filename).is_file():
            _check_fetched(path)
            return path
    path = directory / filename
    if path.exists() or path.is_symlink():
        kind = "a folder" if path.is_dir() else "no regular file" if path.exists() else "a link that leads nowhere"
        raise NotFoundError(f"{path} is {kind}; put the file itself there")
    found = sorted(entry.name for entry in directory.iterdir())
    raise NotFoundError(f"{directory} has no file '{filename}'; it has {', '.join(found) or 'no files'}")


def _check_fetched(path: Path) -> None:
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    if is_pointer:
        raise InvalidArgumentError(f"{path} is a pointer of Git LFS, not the file itself; fetch it with git lfs pull")


def read_label_file(directory: Path, filename: str) -> tuple[Path, list[bytes]]:
    """The path of the file, and its lines, one label each, as bytes of UTF-8. Raises as ``existing_file``, and OSError.

    The model's folder comes first, as in Triton Inference Server, then the version's, for labels that change with it.
    """
    path = existing_file(directory.parent, filename, parents=(directory,))
    return path, path.read_bytes().removesuffix(b"\n").replace(b"\r\n", b"\n").split(b"\n")
