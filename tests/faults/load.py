"""Numbered requests at a steady rate, each answer checked: ``python -m tests.faults.load ADDRESS GRAPH``.

A process of its own, so that it can run on another host and is not slowed by the test. It sends until its standard
input ends, waits for what is still open, and writes one JSON array with a ``Record`` for each request, as
``[due_s, sent_s, ended_s, status, num_answers]``.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from dataclasses import astuple, dataclass

import grpc
import numpy as np
from tests.messages import request_from_call, result_from_response

from weft.base.core import InferCall
from weft.base.tensors import decode, encode
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

#: How much later than its deadline a call may end, in seconds.
LOST_AFTER_S = 5.0


@dataclass(slots=True)
class Record:
    """One request and what became of it.

    Attributes:
        due_s, sent_s, ended_s: On the clock of ``time.monotonic``, which all processes of a machine share.
        status: ``OK``; ``WRONG``: an answer that is not the request's; the name of a gRPC status; ``LOST``: neither
            answer nor error, ``LOST_AFTER_S`` beyond the deadline.
        num_answers: More than one is a fault, whatever they say.
    """

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: str = "LOST"
    num_answers: int = 0

    def end(self, status: str) -> None:
        """The first end counts; each answer is counted."""
        self.num_answers += status in ("OK", "WRONG")
        if not self.ended_s:
            self.status, self.ended_s = status, time.monotonic()


class Load:
    """Sends unary calls, and over one stream a quarter as many.

    Args:
        address: Of a router.
        graph: Takes X and answers Y = X + 3, FP32 ``[1, 1]``.
        deadline_s: Of each call.
    """

    def __init__(self, address: str, graph: str, deadline_s: float) -> None:
        self.records: list[Record] = []
        self._graph = graph
        self._deadline_s = deadline_s
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._unary: set[asyncio.Task[None]] = set()
        self._stream = _Stream(self._stub)

    async def run(self, rate_per_s: float, is_over: asyncio.Event) -> None:
        """Send until ``is_over``; then every request has ended, or is lost."""
        begin_s = time.monotonic()
        while not is_over.is_set():
            number = len(self.records)
            due_s = begin_s + number / rate_per_s
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            record = Record(due_s)
            self.records.append(record)
            if number % 5 == 4:
                await self._stream.send(self._request(number), record)
            else:
                task = asyncio.create_task(self._call(self._request(number), record, number))
                self._unary.add(task)
                task.add_done_callback(self._unary.discard)
        open_calls = [*self._unary, asyncio.create_task(self._stream.drained())]
        await asyncio.wait(open_calls, timeout=self._deadline_s + LOST_AFTER_S)
        await self._channel.close(None)

    def _request(self, number: int) -> pb.ModelInferRequest:
        data = encode(np.array([[number]], np.float32))
        timeout_us = int(self._deadline_s * 1e6)
        return request_from_call(InferCall(self._graph, "", str(number), {"timeout": timeout_us}, {"X": data}))

    async def _call(self, request: pb.ModelInferRequest, record: Record, number: int) -> None:
        record.sent_s = time.monotonic()
        try:
            response = await self._stub.ModelInfer(request, timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            record.end(error.code().name)
        else:
            record.end(verdict(response, number))


class _Stream:
    """Requests over ``ModelStreamInfer``; a stream that ends is opened again, what was open on it has its status."""

    def __init__(self, stub: GRPCInferenceServiceStub) -> None:
        self._stub = stub
        self._open: dict[str, Record] = {}
        self._rpc: grpc.aio.StreamStreamCall[pb.ModelInferRequest, pb.ModelStreamInferResponse] | None = None
        self._reader: asyncio.Task[None] | None = None

    async def send(self, request: pb.ModelInferRequest, record: Record) -> None:
        """The request is on its way, or has failed."""
        if self._rpc is None:
            self._rpc = self._stub.ModelStreamInfer()
            self._reader = asyncio.create_task(self._read(self._rpc))
        self._open[request.id] = record
        record.sent_s = time.monotonic()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader tells
            await self._rpc.write(request)

    async def drained(self) -> None:
        """Nothing is open any more, and no late answer comes."""
        if self._rpc is not None and self._reader is not None:
            await self._rpc.done_writing()  # the router answers what it took, then ends the stream
            await self._reader

    async def _read(self, rpc: "grpc.aio.StreamStreamCall[pb.ModelInferRequest, pb.ModelStreamInferResponse]") -> None:
        status = "UNAVAILABLE"
        try:
            async for message in rpc:
                response = message.infer_response
                if message.error_message:
                    self._open[response.id].end(response.parameters["grpc_status"].string_param or "UNKNOWN")
                else:
                    self._open[response.id].end(verdict(response, int(response.id)))
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        finally:
            if self._rpc is rpc:
                self._rpc = None
            for record in self._open.values():
                if not record.ended_s:
                    record.end(status)


def verdict(response: pb.ModelInferResponse, number: int) -> str:
    """Whether an answer is that of the request."""
    (answer,) = decode(result_from_response(response).outputs["Y"]).ravel().tolist()
    return "OK" if answer == number + 3 and response.id == str(number) else "WRONG"


async def _main(options: argparse.Namespace) -> None:
    is_over = asyncio.Event()
    load = Load(options.address, options.graph, options.deadline_s)
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, is_over.set)
    print("sending", flush=True)
    await load.run(options.rate_per_s, is_over)
    loop.remove_reader(sys.stdin)
    print(json.dumps([astuple(record) for record in load.records]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("graph")
    parser.add_argument("--rate-per-s", type=float, default=50.0)
    parser.add_argument("--deadline-s", type=float, default=2.0)
    asyncio.run(_main(parser.parse_args()))
