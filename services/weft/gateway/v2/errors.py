"""Errors in the form of V2."""

from typing import Any

from starlette.responses import JSONResponse

from weft.base.errors import WeftError
from weft.gateway.errors import error_response


def error_body(error: WeftError) -> dict[str, Any]:
    """``{"error": message}``."""
    return {"error": error.message}


def error_answer(error: WeftError) -> JSONResponse:
    """Status and headers as of the other interfaces, with this body."""
    response = error_response(error)
    return JSONResponse(error_body(error), response.status, response.headers)
