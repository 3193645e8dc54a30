"""V2 RPCs of shared memory."""

from weft.base.errors import UnsupportedError
from weft.v2.protocol.shared_memory import DISABLED, CudaRegion, SharedMemory, SystemRegion
from weft.v2.server.call_boundary import CallBoundary, Context, answering
from weft_protos import grpc_service_pb2 as pb


class SharedMemoryServicer:
    """Shared-memory RPCs. Status and unregister succeed even if disabled, because clients call them unconditionally.

    Args:
        edge: Call boundary of the service.
        memory: The registered regions; None: disabled.
    """

    def __init__(self, edge: CallBoundary, memory: SharedMemory | None) -> None:
        self._edge = edge
        self._memory = memory

    @answering
    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        """One region, or all."""
        regions = () if self._memory is None else self._memory.regions(request.name, SystemRegion)
        status = pb.SystemSharedMemoryStatusResponse.RegionStatus
        return pb.SystemSharedMemoryStatusResponse(
            regions={
                region.name: status(name=region.name, key=region.key, offset=region.start, byte_size=region.byte_size)
                for region in regions
            }
        )

    @answering
    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """UNIMPLEMENTED if disabled."""
        if self._memory is None:
            raise UnsupportedError(DISABLED)
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """One region, or all; requests in flight keep the regions they use."""
        if self._memory is not None:
            self._memory.unregister(request.name, SystemRegion)
        return pb.SystemSharedMemoryUnregisterResponse()

    @answering
    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        """One region, or all."""
        regions = () if self._memory is None else self._memory.regions(request.name, CudaRegion)
        status = pb.CudaSharedMemoryStatusResponse.RegionStatus
        return pb.CudaSharedMemoryStatusResponse(
            regions={
                region.name: status(name=region.name, device_id=region.device_id, byte_size=region.byte_size)
                for region in regions
            }
        )

    @answering
    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """UNIMPLEMENTED if disabled, or without CUDA."""
        if self._memory is None:
            raise UnsupportedError(DISABLED)
        self._memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """One region, or all; requests in flight keep the regions they use."""
        if self._memory is not None:
            self._memory.unregister(request.name, CudaRegion)
        return pb.CudaSharedMemoryUnregisterResponse()
