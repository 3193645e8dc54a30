"""The event loop of a service process."""

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop where that is installed (`pip install 'weft-mesh[uvloop]'`), else of asyncio."""
    try:
        import uvloop  # noqa: PLC0415  # 14 MB, which are optional
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
