"""Reader of the safetensors files of a Hugging Face folder."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from safetensors import SafetensorError, safe_open

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.weights.parts import Part, listed, other_weights, read_object

if TYPE_CHECKING:  # names, shapes and types are checked without torch
    import torch

    from weft_kernels.linear.quantized import QuantizedWeight

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX = ".safetensors"
#: Types of weights that are not quantised, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """Shape and type of a stored tensor, or the required ones; ``dtypes``: type name, or the allowed ones."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class Checkpoint:
    """Open safetensors files; reads each tensor on demand. Created by ``open``.

    Attributes:
        has_values: Tensors can be read, for which torch is imported; else only names, shapes and types are known.
    """

    def __init__(self, files: dict[str, tuple[Any, str]], *, has_values: bool) -> None:
        self._files = files
        self.has_values = has_values

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, has_values: bool = True) -> Iterator[Self]:
        """Open ``model.safetensors`` of a folder, else ``model.safetensors.index.json`` and the files that it names.

        Raises:
            NotFoundError: Both are missing, or a file that the index names is.
            InvalidArgumentError: The index is malformed, names a file outside of the folder or a tensor that is not in
                the file it names; or a file is truncated.
        """
        with ExitStack() as stack:
            index = {} if (path / _SINGLE).is_file() else _read_index(path)
            handles = {
                name: stack.enter_context(_open(path / name, "pt" if has_values else "numpy"))
                for name in sorted(set(index.values())) or [_SINGLE]
            }
            files = {}
            for name, handle in handles.items():
                files.update(dict.fromkeys(handle.keys(), (handle, name)))
            for tensor, name in index.items():
                if files.get(tensor, (None, ""))[1] != name:
                    raise InvalidArgumentError(
                        f"{path / _INDEX} says that '{tensor}' is in {name}, and it is not; index and files are not of "
                        f"the same model: fetch the folder again"
                    )
            yield cls(files, has_values=has_values)

    @property
    def names(self) -> Set[str]:
        """Names of all tensors."""
        return self._files.keys()

    def find(self, name: str) -> StoredTensor | None:
        """Shape and type of the tensor ``name``; None if there is none."""
        if name not in self._files:
            return None
        tensor = self._files[name][0].get_slice(name)
        return StoredTensor(tuple(tensor.get_shape()), (tensor.get_dtype(),))

    def check(self, wanted: dict[str, StoredTensor], ignored: Iterable[str]) -> None:
        """Validate names, shapes and types against those of the model, before any data is read.

        Args:
            wanted: Shape and possible types of every required tensor.
            ignored: Names that may be present as well; one that ends with a dot stands for all that begin with it.

        Raises:
            InvalidArgumentError: Tensors are missing, unexpected, or of another shape or type.
        """
        ignored = set(ignored)
        prefixes = tuple(name for name in ignored if name.endswith("."))
        cure = "config.json and the weights are of different models"
        if missing := sorted(wanted.keys() - self._files):
            raise InvalidArgumentError(f"weights: {listed(missing)} missing; {cure}, or a file was left out")
        others = self._files.keys() - wanted - ignored
        if surplus := sorted(name for name in others if not name.startswith(prefixes)):
            raise InvalidArgumentError(f"weights: {listed(surplus)} not part of the model; {cure}")
        for name, (shape, dtypes) in wanted.items():
            handle, file = self._files[name]
            tensor = handle.get_slice(name)
            if (got := tuple(tensor.get_shape())) != shape:
                raise InvalidArgumentError(
                    f"weights: '{name}' in {file} must have shape {list(shape)}, got {list(got)}; {cure}"
                )
            if (dtype := tensor.get_dtype()) not in dtypes:
                quantised = "; config.json does not say how it is quantised" if dtypes == FLOATS else ""
                raise InvalidArgumentError(
                    f"weights: '{name}' in {file} must have one of the types {', '.join(dtypes)}, got {dtype}"
                    f"{quantised}; fetch the folder again, or take the model before it was quantised"
                )

    def read(self, name: str, cuts: Sequence[tuple[slice, ...]] = ()) -> "torch.Tensor":
        """Copy the tensor ``name`` to the CPU as it is stored, or only its ``cuts``, one after another.

        Raises InvalidArgumentError if its file cannot be read.
        """
        handle, file = self._files[name]
        try:
            if cuts:
                import torch  # noqa: PLC0415

                stored = handle.get_slice(name)
                return torch.cat([stored[each] for each in cuts])
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InvalidArgumentError(f"weights: cannot read '{name}' of {file}: {error}") from error
        return tensor


def _read_index(path: Path) -> dict[str, str]:
    parsed = read_object(path / _INDEX)
    if parsed is None:
        raise NotFoundError(f"no {_SINGLE} or {_INDEX} in {path}{other_weights(path)}")
    index = parsed.get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise InvalidArgumentError(f"{path / _INDEX} must have 'weight_map' with a file name for each tensor")
    for tensor, name in index.items():
        # Path traversal: a name with a directory, in any system's syntax, could read files outside of the folder.
        if PurePosixPath(name).name != name or "\\" in name or ":" in name or not name.endswith(_SUFFIX):
            raise InvalidArgumentError(
                f"{path / _INDEX}: '{tensor}' must be in a {_SUFFIX} file of the same folder, got {name!r}"
            )
    return index


def _open(path: Path, framework: str) -> Any:
    try:
        return safe_open(path, framework=framework, device="cpu")
    except FileNotFoundError as error:
        raise NotFoundError(f"no file {path}, which {_INDEX} names; fetch the folder again") from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise InvalidArgumentError(
            f"{path} ({size} bytes) is torn or no safetensors file: {error}; fetch it again"
        ) from error


class Module(NamedTuple):
    """A linear layer in a checkpoint, named like ``model.layers.0.mlp.up_proj``.

    Its tensors are named without the prefix.

    Attributes:
        shape: Of its weight, ``[out, in]``.
        part: Its weight.
    """

    name: str
    shape: tuple[int, int]
    checkpoint: Checkpoint
    part: Part

    def path(self, tensor: str) -> str:
        """The whole name of a tensor."""
        return f"{self.name}{'_' if self.part.stored else '.'}{tensor}"

    def find(self, tensor: str) -> StoredTensor | None:
        """Shape and type of a tensor; None if there is none."""
        return self.checkpoint.find(self.path(tensor))

    def read(self, tensor: str) -> "torch.Tensor":
        """A copy of a tensor."""
        return self.checkpoint.read(self.path(tensor))

    def wrong(self, tensor: str, allowed: str, got: object) -> InvalidArgumentError:
        """Error for a tensor that contradicts its format."""
        return InvalidArgumentError(
            f"weights: '{self.path(tensor)}' must be {allowed}, got {got}; fetch the folder again, or quantise the "
            f"model again"
        )

    def num_groups(self, scales: str, axis: int) -> int:
        """Number of input groups, from the shape of the scales along ``axis``.

        Raises:
            InvalidArgumentError: The scales are missing, or their number does not divide the inputs.
        """
        stored, num_inputs = self.find(scales), self.shape[1]
        if stored is None:
            raise InvalidArgumentError(
                f"weights: '{self.name}.{scales}' is missing, the scales of '{self.name}'; fetch the folder again, or "
                f"quantise it again"
            )
        groups = stored.shape[axis] if len(stored.shape) == 2 else 0
        if groups < 1 or num_inputs % groups or (groups > 1 and num_inputs // groups % 2):
            allowed = f"of two dimensions, with a number along axis {axis} that divides {num_inputs} into even groups"
            raise self.wrong(scales, allowed, list(stored.shape))
        return groups

    def permutation(self, tensor: str, group_size: int) -> "torch.Tensor | None":
        """The order of inputs that makes each group contiguous; None if they already are, or there is no such tensor.

        Raises:
            InvalidArgumentError: The tensor, the group of each input, has more or fewer inputs of some group.
        """
        if self.find(tensor) is None:
            return None
        import torch  # noqa: PLC0415

        g_idx = self.read(tensor).long()
        groups = g_idx.numel() // group_size
        in_order = torch.arange(groups).repeat_interleave(group_size)
        if torch.equal(g_idx, in_order):
            return None
        order = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order], in_order):
            raise self.wrong(
                tensor,
                f"the group of each input, {group_size} of each of {groups}",
                f"from {int(g_idx.min())} to {int(g_idx.max())} in other numbers",
            )
        return order


class WeightFormat(ABC):
    """Reads the linear layers of a folder. Layers that are not quantised are recognised by their tensors.

    Attributes:
        ignored: Names of tensors that a quantised module may have and that are not read.
    """

    name: ClassVar[str]
    ignored: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def is_quantized(self, module: Module) -> bool:
        """Whether the weight of the module is stored in this format; else it is stored as plain numbers."""

    @abstractmethod
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        """The tensors of the stored weight, with their required shapes and types.

        Raises:
            InvalidArgumentError: A tensor that determines others is missing or wrong.
        """

    @abstractmethod
    def read(self, module: Module) -> "torch.Tensor | QuantizedWeight":
        """Read the weight from checked tensors. Raises InvalidArgumentError for impossible values."""
