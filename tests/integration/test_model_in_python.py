"""A model written in Python: written to a repository, served by a mesh, asked over gRPC."""

import numpy as np
import pytest
from tests.unit.authoring.test_model import checked, count, top2

import weft
import weft.testing
from weft.base.tensors import decode, encode
from weft.mesh.preflight import MeshError
from weft.testing.plugin import weft_mesh  # noqa: F401  # a fixture


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """The models of the unit tests, as ``weft up`` finds them."""
    folder = tmp_path_factory.mktemp("repository")
    for model in (top2, checked, count):
        model.write(folder / "model")
    (folder / "graphs").mkdir()
    return folder


async def test_a_mesh_serves_what_was_written(repository, weft_mesh):  # noqa: F811  # the fixture
    """A mesh answers as the function does and as ``weft.testing`` says, in batches, with its errors, and in streams."""
    router = weft_mesh(repository)["router"]
    probs = np.random.default_rng(7).random((5, 10), np.float32)
    async with weft.V2Client(router.grpc) as client:
        result = await client.infer(_call("top2", PROBS=probs), timeout_s=60)
        assert top2(probs)["FIRST"].tolist() == _array(result, "FIRST").tolist()
        with weft.testing.model(repository / "model" / "top2") as tested:
            assert tested(PROBS=probs).FIRST.tolist() == _array(result, "FIRST").tolist()
        with pytest.raises(weft.WeftError, match="output 'Y' of checked is float64, but must be float32"):
            await client.infer(
                _call("checked", X=np.ones((1, 2), np.float32), HOW=np.array([[b"dtype"]], object)), timeout_s=60
            )
        responses = [one async for one in client.stream(_call("count", LIMIT=np.array([3])), timeout_s=60)]
        assert [0, 1, 2] == [_array(one, "I")[0] for one in responses if one.outputs]


def _call(model, **arrays):
    return weft.InferCall(model, inputs={name: encode(array) for name, array in arrays.items()})


def _array(result, name):
    return decode(result.outputs[name])


def test_a_mesh_is_started_once(repository, weft_mesh):  # noqa: F811  # the fixture
    """The same repository with the same arguments is the same mesh, until the session ends."""
    assert weft_mesh(repository) is weft_mesh(str(repository))


def test_a_mesh_that_does_not_come_up_says_why(tmp_path, weft_mesh):  # noqa: F811  # the fixture
    """The error has the last message of the mesh, and the path of the log."""
    with pytest.raises(MeshError, match=r"nowhere.*mesh.log") as raised:
        weft_mesh(tmp_path / "nowhere")
    assert "weft up" in str(raised.value)
