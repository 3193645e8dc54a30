"""What ``weft up`` gives to the services that it starts."""

import argparse

import pytest

from weft_cli.arguments.mesh import add_commands
from weft_cli.commands.up import _service_arguments

FLAG = "--disable-auto-complete-config"


@pytest.mark.parametrize("more", [[], ["--model-control-mode=poll"], ["--in-process"]])
def test_completion_is_turned_off_in_every_service_of_models(more: list[str]) -> None:
    """The flag goes to each of them, in processes of their own or in the router's, and is not there otherwise."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    for flags, expected in (([], []), ([FLAG], ["model", "postprocess", "preprocess"])):
        arguments = _service_arguments(parser.parse_args(["up", *more, *flags]))
        assert expected == sorted(name for name, given in arguments.items() if FLAG in given)
