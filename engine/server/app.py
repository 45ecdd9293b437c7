"""The FastAPI app: routes, keys, health."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from turbomill import __version__
from turbomill.engine.base import AsyncEngine
from turbomill.engine.server.answers import Context, answer
from turbomill.engine.server.errors import ApiError, install_error_handlers
from turbomill.engine.server.metrics import ServerMetrics
from turbomill.engine.server.protocol import ChatRequest, CompletionRequest
from turbomill.engine.server.shapes import ChatShape, CompletionShape

HANG_TIMEOUT = 120.0  # seconds; a step is a token, or one chunk of a prompt


def _key_check(api_keys: Sequence[str]) -> Any:
    async def check(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(key.encode(), api_key.encode()) for api_key in api_keys]
        if api_keys and not (scheme.lower() == "bearer" and any(known)):
            raise ApiError(
                401, "missing or wrong API key in the Authorization header", code="invalid_api_key"
            )

    return check


def create_app(
    engine: AsyncEngine,
    model_name: str,
    api_keys: Sequence[str] = (),
    *,
    hang_timeout: float = HANG_TIMEOUT,
) -> FastAPI:
    """The app that serves `engine` under the name `model_name`. It does not own the engine.

    With `api_keys`, every route under /v1, and those that control the engine, want one of them as a bearer
    token. /health calls an engine hung whose step takes longer than `hang_timeout` seconds.
    """
    app = FastAPI(title="Turbomill", version=__version__)
    install_error_handlers(app)
    context = Context(engine, model_name, ServerMetrics(engine, model_name))
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(_key_check(api_keys))])
    card = {
        "id": model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "turbomill",
        "max_model_len": engine.session_len,
    }

    def check_model(name: str) -> None:
        if name != model_name:
            raise ApiError(
                404,
                f"model {name!r} does not exist; this server has {model_name!r}",
                "model",
                "model_not_found",
            )

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @v1.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return card

    @v1.post("/chat/completions", response_model=None)
    async def chat_completions(request: ChatRequest, http: Request) -> Response:
        check_model(request.model)
        request.check_supported()
        messages = [message.as_template_input() for message in request.messages]
        # Long texts take a while to tokenize; the event loop goes on meanwhile.
        token_ids = await asyncio.to_thread(engine.encode, messages)
        return await answer(context, http, request, [token_ids], ChatShape)

    @v1.post("/completions", response_model=None)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        check_model(request.model)
        request.check_supported()
        prompts = [await asyncio.to_thread(engine.encode, prompt) for prompt in request.prompts()]
        return await answer(context, http, request, prompts, CompletionShape, request.prompts())

    @app.get("/health")
    async def health() -> JSONResponse:
        now = engine.metrics()
        hung = now.stalled_seconds > hang_timeout
        healthy = now.healthy and not hung
        status = "hung" if hung else "ok" if now.healthy else "unhealthy"
        body = {
            "status": "paused" if healthy and now.paused else status,
            "model": model_name,
            "engine": engine.info.name,
            "backend": engine.info.backend,
            "reason": engine.info.reason,
            "kv_cache": engine.info.kv_cache,
        }
        return JSONResponse(body, status_code=200 if healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        # The format has its own content type, charset included.
        return Response(
            generate_latest(context.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    # Routes and parameters as vLLM and LMDeploy have them.
    control = APIRouter(dependencies=[Depends(_key_check(api_keys))])

    @control.post("/sleep")
    def sleep(level: int = 1) -> dict[str, Any]:
        engine.sleep(level)
        return {"paused": True}

    @control.post("/wakeup")
    @control.post("/wake_up")
    def wakeup() -> dict[str, Any]:
        engine.wakeup()
        return {"paused": False}

    @control.post("/pause")
    def pause() -> dict[str, Any]:
        engine.pause()
        return {"paused": True}

    @control.post("/resume")
    def resume() -> dict[str, Any]:
        engine.resume()
        return {"paused": False}

    @control.post("/update_weights")
    def update_weights(model: str) -> dict[str, Any]:
        engine.update_params(model)
        return {"updated": model}

    @control.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        return {"is_sleeping": engine.metrics().paused}

    app.include_router(control)
    app.include_router(v1)
    return app
