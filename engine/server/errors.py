"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from turbomill.errors import TurbomillError, UsageError

logger = logging.getLogger("turbomill.server")

TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An answer other than 200, with the parameter at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """What an exception means to a client: the request is at fault (400), or the server (500)."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, TurbomillError):
        return ApiError(500, str(error))
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error, also those of the framework, in the OpenAI shape."""

    def answer(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status)

    async def own(_: Request, error: Exception) -> JSONResponse:
        return answer(as_api_error(error))

    async def validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        param = where[0] if where else None
        return answer(ApiError(400, f"{'.'.join(where) or 'body'}: {first['msg']}", param))

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return answer(ApiError(error.status_code, str(error.detail)))

    app.add_exception_handler(ApiError, own)
    app.add_exception_handler(TurbomillError, own)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, own)
