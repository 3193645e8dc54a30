"""Clients that make a mesh's life hard for as long as the block runs."""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import grpc
import numpy as np
from tests.messages import request_from_call

from weft.base.core import InferCall
from weft.base.tensors import encode
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

Act = Callable[[str, random.Random], None]


def request(number: float = 1.0, model: str = "chain") -> pb.ModelInferRequest:
    """A right request."""
    return request_from_call(InferCall(model, inputs={"X": encode(np.array([[number]], np.float32))}))


def cancels(address: str, generator: random.Random) -> None:
    """Ten calls, each withdrawn at a random moment, or answered before."""
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(request(), timeout=10) for _ in range(10)]
        for call in calls:
            with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError, grpc.RpcError):
                call.result(timeout=generator.uniform(0, 0.03))
            call.cancel()


def vanishes(address: str, generator: random.Random) -> None:
    """A stream with requests in work whose connection is closed."""
    channel = grpc.insecure_channel(address)
    answers = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request(i) for i in range(8)]))
    with contextlib.suppress(grpc.RpcError):
        for _ in range(generator.randint(0, 4)):
            next(answers)
    channel.close()


def errs(address: str, generator: random.Random) -> None:
    """Requests that are wrong in one way each."""
    cut = request()
    cut.raw_input_contents[0] = b"abc"
    doubled = request()
    doubled.inputs.append(doubled.inputs[0])
    wrongs = [pb.ModelInferRequest(), pb.ModelInferRequest(model_name="chain"), request(model="none"), cut, doubled]
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for wrong in generator.sample(wrongs, 3):
            with contextlib.suppress(grpc.RpcError):
                stub.ModelInfer(wrong, timeout=10)
        with contextlib.suppress(grpc.RpcError):
            stub.ModelInfer(request(), timeout=generator.uniform(0.0001, 0.01))


def reloads(address: str, generator: random.Random) -> None:
    """The graph is loaded anew while it is in use."""
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="chain"), timeout=20)
    threading.Event().wait(generator.uniform(0.2, 0.6))


ACTS: tuple[Act, ...] = (cancels, vanishes, errs, reloads)


def at_work(address: str) -> contextlib.AbstractContextManager[Counter[str]]:
    """Each act, again and again, on a thread of its own; how often each was done."""
    return repeated({act.__name__: partial(act, address) for act in ACTS}, pause_s=0.05)


@contextlib.contextmanager
def repeated(acts: Mapping[str, Callable[[random.Random], None]], *, pause_s: float) -> Iterator[Counter[str]]:
    """Each act by name, again and again, on a thread of its own with a seed of its own; how often each was done."""
    is_over = threading.Event()
    done: Counter[str] = Counter()
    failures: list[BaseException] = []

    def repeat(name: str, act: Callable[[random.Random], None], seed: int) -> None:
        generator = random.Random(seed)
        try:
            while not is_over.wait(pause_s):
                act(generator)
                done[name] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(name, act, seed)) for seed, (name, act) in enumerate(acts.items())]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert not failures, failures
