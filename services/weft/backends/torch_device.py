"""The device of a torch program, with copies to and from it.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html and
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from weft.base.tensors import NUMPY_BY_DATATYPE, Array


class TorchDevice:
    """The device of one instance; on a GPU with a CUDA stream of its own, the only one that it waits for.

    Args:
        torch: The package.
        device: A ``torch.device``.
        pins_inputs: Whether ``empty`` returns pinned memory on a GPU. torch's allocator reuses it for later arrays.
        pins_outputs: Whether ``to_host`` copies to pinned memory on a GPU.
        is_channels_last: Whether four-dimensional tensors use the NHWC memory format.
    """

    def __init__(
        self, torch: Any, device: Any, *, pins_inputs: bool = True, pins_outputs: bool = True, is_channels_last: bool
    ) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._torch = torch
        self._pins_inputs = pins_inputs and self.is_gpu
        self._pins_outputs = pins_outputs and self.is_gpu
        self._is_channels_last = is_channels_last
        self._stream = None
        if self.is_gpu:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the weights are copied there

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run torch operations of the block on the stream and synchronise at its end, also if the block raises."""
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """An uninitialised array that ``to_device`` can copy asynchronously if pinned."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=self._pins_inputs)
        array: Array = memory.numpy().view(dtype).reshape(shape)
        return array

    def to_device(self, array: Array) -> Any:
        """Copy an array to the device; complete at the end of ``running``, and the array must not change until then.

        bfloat16 is copied bitwise, because NumPy has no such type of its own.
        """
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors
        if array.dtype.name == "bfloat16":
            tensor = self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        else:
            tensor = self._torch.from_numpy(array)
        tensor = tensor.to(self.device, non_blocking=True)
        if self._is_channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=self._torch.channels_last)
        return tensor

    def to_host(self, tensor: Any) -> Any:
        """Copy a tensor to host memory; complete at the end of ``running``, and only then usable by ``to_numpy``."""
        tensor = tensor.detach()
        if not self.is_gpu:
            return tensor
        host = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pins_outputs)
        return host.copy_(tensor, non_blocking=True)

    def to_numpy(self, tensor: Any) -> Array:
        """The host tensor as an array, which shares its memory if possible."""
        array: Array
        if tensor.dtype == self._torch.bfloat16:
            array = tensor.contiguous().view(self._torch.int16).numpy().view(NUMPY_BY_DATATYPE["BF16"])
        else:
            array = tensor.numpy()
        return array
