"""Models in the local cache of Hugging Face, as models of a repository. Nothing but ``download`` uses the network."""

import os
import re
from pathlib import Path, PurePosixPath

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from weft.base.repository.layout import CONFIG_FILENAME
from weft.llm.weights.gguf import find_gguf
from weft.llm.weights.parts import listed, other_weights, read_object

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_ENCODER = re.compile(r"(Bert|Roberta|XLMRoberta|Camembert|ModernBert)(Model|ForMaskedLM|ForSequenceClassification)")
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
#: What a model needs, of all that its repository may have.
_FILES = ("*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.jinja", "*.txt")
_CONFIG = """\
# {name} at {commit}, in the cache of Hugging Face: folder 1 is a link to it.
backend: "{backend}"
"""


def cache_folder() -> Path:
    """Where ``huggingface_hub`` keeps models, by the variables that it reads."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(given)))


def find_snapshot(name: str, revision: str) -> Path:
    """The folder of a model in the cache.

    Args:
        name: Of its repository, like ``ORG/NAME``.
        revision: A branch, a tag or a commit.

    Raises:
        NotFoundError: The cache does not have it, or not all of it; the message has the command that fetches it.
        InvalidArgumentError: The name or the revision cannot be one, or the model's files cannot be served.
    """
    if not _NAME.fullmatch(name) or "--" in name or ".." in name:
        raise InvalidArgumentError(f"--hf must be a repository of Hugging Face, like ORG/NAME, got '{name}'")
    if not revision or PurePosixPath(revision).is_absolute() or ".." in PurePosixPath(revision).parts:
        raise InvalidArgumentError(f"--revision must be a branch, a tag or a commit, got '{revision}'")
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    fetch = f"fetch it: hf download {name}{'' if revision == 'main' else f' --revision {revision}'}"
    if not folder.is_dir():
        raise NotFoundError(f"'{name}' is not in {folder.parent}; {fetch}, or give --download")
    reference = folder / "refs" / revision
    commit = reference.read_text(encoding="utf-8", errors="replace").strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        held = sorted(path.name for path in folder.glob("snapshots/*"))
        raise NotFoundError(
            f"'{name}' has no revision '{revision}' in {folder}, it has {', '.join(held) or 'none'}; give one of them "
            f"as --revision, or {fetch}"
        )
    _check_files(snapshot, fetch)
    return snapshot


def download(name: str, revision: str) -> None:
    """Fetch a model into the cache.

    Raises:
        UnsupportedError: The package ``huggingface_hub`` is not installed.
        UnavailableError: It cannot be fetched.
    """
    try:
        import huggingface_hub  # noqa: PLC0415  # optional
    except ModuleNotFoundError as error:
        raise UnsupportedError("--download needs huggingface_hub: pip install huggingface_hub") from error
    try:
        huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(_FILES))
    except Exception as error:  # of its own, of HTTP, of files
        raise UnavailableError(f"'{name}' cannot be fetched: {str(error).strip()[:500]}") from error


def link_model(repository: Path, name: str, snapshot: Path) -> list[Path]:
    """Make a model of ``repository`` of a snapshot; returns its configuration and its version folder, a link.

    Raises:
        AlreadyExistsError: The repository has a model of this name.
        OSError: It cannot be written.
    """
    folder = repository / "model" / name.rpartition("/")[2]
    if folder.exists():
        raise AlreadyExistsError(f"'{folder}' is there; remove it, or give another repository")
    named = (read_object(snapshot / "config.json") or {}).get("architectures")
    backend = "encoder" if isinstance(named, list) and _ENCODER.fullmatch(str(*named[:1])) else "llm"
    folder.mkdir(parents=True)
    (repository / "graphs").mkdir(exist_ok=True)  # which weft up needs
    config, version = folder / CONFIG_FILENAME, folder / "1"
    version.symlink_to(snapshot.absolute(), target_is_directory=True)
    config.write_text(_CONFIG.format(name=name, commit=snapshot.name, backend=backend), encoding="utf-8")
    return [config, version]


def _check_files(snapshot: Path, fetch: str) -> None:
    """Raise unless the configuration and all weights are there, in a form that is read."""
    if find_gguf(snapshot) is not None:
        return
    index = None if (snapshot / _WEIGHTS).is_file() else read_object(snapshot / _INDEX)
    files = {"": _WEIGHTS} if index is None else index.get("weight_map")
    if not isinstance(files, dict):
        raise InvalidArgumentError(f"{snapshot / _INDEX} must have 'weight_map', got {files!r}; {fetch}")
    names = sorted({"config.json", *map(str, files.values())})
    # A file is a link to a blob, which is there when all of it is.
    missing = [file for file in names if not (snapshot / file).is_file()]
    if not missing:
        return
    if index is None and (others := other_weights(snapshot)):
        raise InvalidArgumentError(f"{snapshot} has no {_WEIGHTS}{others}")
    unfinished = [path.name for path in sorted(snapshot.parents[1].glob("blobs/*.incomplete"))]
    also = f", and the download of {listed(unfinished)} unfinished" if unfinished else ""
    raise NotFoundError(f"{snapshot} is incomplete: {listed(missing)} missing{also}; {fetch}")
