"""What a name that a server does not know was probably meant to be."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from weft.base.errors import NotFoundError, RemoteError
from weft.base.text.suggestion import suggestion
from weft.v2.client.v2_client import V2Client

_TIMEOUT_S = 5.0


@asynccontextmanager
async def names_similar_models(client: V2Client, name: str) -> AsyncGenerator[None, None]:
    """An error that the server does not know ``name`` goes on with the most similar name that it does.

    The names are those that the server lists to this client.
    """
    try:
        yield
    except RemoteError as error:
        if error.code != NotFoundError.code:
            raise
        try:
            known = [model.name for model in await client.index(timeout_s=_TIMEOUT_S)]
        except RemoteError:
            known = []
        if not known or name in known:
            raise
        raise error.with_message(error.message + suggestion(name, known)) from None
