"""The RPCs of V2 that register and unregister shared memory."""

from weft_common.errors import UnsupportedError
from weft_common.protocol.shared_memory import DISABLED, CudaRegion, SharedMemory, SystemRegion
from weft_common.server.call_boundary import CallBoundary, Context, answering
from weft_protos import grpc_service_pb2 as pb
from weft_protos import grpc_service_pb2_grpc as pb_grpc


class SharedMemoryServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Status and unregister succeed also where it is disabled, because clients call them unasked.

    Args:
        edge: Of the service.
        memory: Where regions are kept; None: it is disabled.
    """

    def __init__(self, edge: CallBoundary, memory: SharedMemory | None) -> None:
        self._edge = edge
        self._memory = memory

    @answering
    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        """One region, or every one."""
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
        """UNIMPLEMENTED where it is disabled."""
        if self._memory is None:
            raise UnsupportedError(DISABLED)
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """One region, or every one; requests in flight keep what they use."""
        if self._memory is not None:
            self._memory.unregister(request.name, SystemRegion)
        return pb.SystemSharedMemoryUnregisterResponse()

    @answering
    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        """One region, or every one."""
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
        """UNIMPLEMENTED where it is disabled, or where there is no CUDA."""
        if self._memory is None:
            raise UnsupportedError(DISABLED)
        self._memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """One region, or every one; requests in flight keep what they use."""
        if self._memory is not None:
            self._memory.unregister(request.name, CudaRegion)
        return pb.CudaSharedMemoryUnregisterResponse()
