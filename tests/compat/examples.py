"""The example programs of ``tritonclient``, and with which arguments each is run."""

from dataclasses import dataclass
from typing import Final

IMAGE: Final = "{image}"
#: Models that ``get_model_repository_index`` must list, by the programs that count them.
_EIGHT: Final = (
    "simple",
    "simple_string",
    "simple_identity",
    "simple_int8",
    "simple_sequence",
    "simple_dyna_sequence",
    "simple_string_dyna_sequence",
    "repeat_int32",
)
ALL: Final = (*_EIGHT, "custom_identity_int32", "densenet_onnx", "preprocess_inception_ensemble")


@dataclass(frozen=True)
class Example:
    """A program with arguments.

    Attributes:
        name: File name without ``.py``.
        arguments: Further arguments.
        models: What the repository has.
        http: Whether it calls the HTTP port; else gRPC.
        is_explicit: Whether it loads and unloads models, so that the mesh must allow it.
        has_url: Whether it takes ``--url``; else it calls 8000 or 8001.
        limit: What Weft does not do, so that the program fails where it asks for it; "": it must pass.
        fails_with: What it says then; whatever else it fails with is a failure.
        not_run: Why it is not run; "": it is.
    """

    name: str
    arguments: tuple[str, ...] = ()
    models: tuple[str, ...] = ALL
    http: bool = False
    is_explicit: bool = False
    has_url: bool = True
    limit: str = ""
    fails_with: str = ""
    not_run: str = ""


_CUDA: Final = "needs a CUDA device"


def _grpc(name: str, *arguments: str) -> Example:
    return Example(name, arguments)


def _http(name: str, *arguments: str) -> Example:
    return Example(name, arguments, http=True)


EXAMPLES: Final = (
    _grpc("simple_grpc_health_metadata"),
    _grpc("simple_grpc_infer_client"),
    _grpc("simple_grpc_infer_client", "--grpc-compression-algorithm", "gzip"),
    _grpc("simple_grpc_async_infer_client"),
    _grpc("simple_grpc_aio_infer_client"),
    _grpc("simple_grpc_string_infer_client"),
    _grpc("simple_grpc_custom_args_client"),
    _grpc("simple_grpc_keepalive_client"),
    _grpc("simple_grpc_custom_repeat"),
    *(
        _grpc(f"simple_grpc_{name}", *arguments)
        for name in ("sequence_stream_infer_client", "sequence_sync_infer_client", "aio_sequence_stream_infer_client")
        for arguments in ((), ("--dyna",))
    ),
    _grpc("simple_grpc_shm_client"),
    _grpc("simple_grpc_shm_string_client"),
    Example(
        "simple_grpc_model_control",
        models=_EIGHT,
        is_explicit=True,
        limit="all but files that are sent with a load, which are refused with another status: docs/architecture.md",
        fails_with="for oversized file parameter",
    ),
    Example("simple_grpc_cudashm_client", not_run=_CUDA),
    _grpc("grpc_client"),
    _grpc("grpc_explicit_int_content_client"),
    _grpc("grpc_explicit_int8_content_client"),
    _grpc("grpc_explicit_byte_content_client"),
    _grpc("reuse_infer_objects_client", "-i", "grpc"),
    Example("memory_growth_test", ("-i", "grpc", "-r", "100"), has_url=False),
    _http("simple_http_health_metadata"),
    _http("simple_http_infer_client"),
    *(
        _http("simple_http_infer_client", f"--{way}-compression-algorithm", algorithm)
        for way in ("request", "response")
        for algorithm in ("gzip", "deflate")
    ),
    _http("simple_http_async_infer_client"),
    _http("simple_http_aio_infer_client"),
    _http("simple_http_string_infer_client"),
    _http("simple_http_sequence_sync_infer_client"),
    _http("simple_http_sequence_sync_infer_client", "--dyna"),
    _http("simple_http_shm_client"),
    _http("simple_http_shm_string_client"),
    Example("simple_http_model_control", models=_EIGHT[:7], http=True, is_explicit=True),
    Example("simple_http_cudashm_client", not_run=_CUDA),
    _http("reuse_infer_objects_client", "-i", "http"),
    Example("memory_growth_test", ("-i", "http", "-r", "100"), http=True, has_url=False),
    *(
        Example("image_client", ("-m", "densenet_onnx", "-s", how, "-c", "3", "-i", protocol, *more, IMAGE), http=http)
        for protocol, http in (("grpc", False), ("http", True))
        for how, more in (("INCEPTION", ()), ("NONE", ("-a",)))
    ),
    _grpc("image_client", "-m", "densenet_onnx", "-c", "3", "-i", "grpc", "--streaming", IMAGE),
    _grpc("grpc_image_client", "-m", "densenet_onnx", "-s", "VGG", "-c", "3", IMAGE),
    _grpc("ensemble_image_client", "-i", "grpc", "-c", "3", IMAGE),
    _http("ensemble_image_client", "-i", "http", "-c", "3", IMAGE),
)
