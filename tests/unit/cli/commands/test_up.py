"""What ``weft up`` gives to the services that it starts."""

import pytest

from weft.cli.__main__ import make_parser
from weft.cli.commands.up import _router_arguments, _service_arguments

FLAG = "--disable-auto-complete-config"


@pytest.mark.parametrize("more", [[], ["--model-control-mode=poll"], ["--in-process"]])
def test_completion_is_turned_off_in_every_service_of_models(more: list[str]) -> None:
    """The flag goes to each of them, in processes of their own or in the router's, and is not there otherwise."""
    parser = make_parser()
    for flags, expected in (([], []), ([FLAG], ["model", "postprocess", "preprocess"])):
        arguments = _service_arguments(parser.parse_args(["up", *more, *flags]))
        assert expected == sorted(name for name, given in arguments.items() if FLAG in given)


def test_the_front_door_controls_models_and_takes_shared_memory() -> None:
    """`explicit` holds for models too, which are all loaded first; shared memory is the router's."""
    options = make_parser().parse_args(["up", "--model-control-mode=explicit", "--allow-client-shm"])
    for name in ("model", "postprocess", "preprocess"):
        given = _service_arguments(options)[name]
        assert {"--model-control-mode=explicit", "--load-model=*"} <= set(given)
        assert "--allow-client-shm" not in given
    assert {"--model-control-mode=explicit", "--allow-client-shm"} <= set(_router_arguments(options))
