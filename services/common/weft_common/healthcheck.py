"""``python -m weft_common.healthcheck HOST:PORT``: exit status 0 if a service answers SERVING; for container images."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main(arguments: list[str]) -> int:
    """0 if the server at the address is SERVING, 1 if it is not or does not answer, 2 for wrong usage."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m weft_common.healthcheck HOST:PORT\n")
        return 2
    with grpc.insecure_channel(arguments[0]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{arguments[0]} does not answer: {error.code().name}\n")
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        sys.stderr.write(f"{arguments[0]} answers {name}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
