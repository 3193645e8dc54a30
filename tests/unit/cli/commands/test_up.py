"""What ``weft up`` gives to the services that it starts."""

from pathlib import Path

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


def test_in_a_repository_of_triton_names_to_load_are_of_models_or_of_graphs(tmp_path: Path) -> None:
    """Each goes to the service that has it, and no model is loaded that is not asked for."""
    for name, text in (("m", 'backend: "python"'), ("other", 'backend: "python"'), ("e", 'platform: "ensemble"')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    (tmp_path / "bare" / "1").mkdir(parents=True)
    names = [f"--load-model={name}" for name in ("m", "e", "bare")]
    options = make_parser().parse_args(["up", "--repository", str(tmp_path), "--model-control-mode=explicit", *names])
    loaded = [argument for argument in _service_arguments(options)["model"] if argument.startswith("--load-model")]
    assert [names[0], names[2]] == loaded
    assert [names[1]] == [argument for argument in _router_arguments(options) if argument.startswith("--load-model")]
