"""Runs the server: the port is taken before the model is loaded, and signals end it gracefully."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from turbomill.engine.config import EngineConfig
from turbomill.engine.select import create_engine
from turbomill.engine.server.app import HANG_TIMEOUT, create_app
from turbomill.errors import TurbomillError

# Seconds that running requests get to finish after SIGINT or SIGTERM.
GRACE = 10


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address; port 0 takes a free one. Raises TurbomillError.

    Listening at once makes the port ours while the model loads; clients that come early wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        raise TurbomillError(
            f"cannot serve on {host}:{port}: {error.strerror or error}; choose another --server-port or "
            "--server-name, or stop what uses it"
        ) from error
    return sock


class _Server(uvicorn.Server):
    """Announces itself when it answers, and returns after a signal instead of raising it again."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready, file=sys.stderr, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def default_model_name(model: str) -> str:
    """The name clients use: the last part of the path, without `.gguf`."""
    path = Path(model)
    return path.stem if path.suffix.lower() == ".gguf" else (path.resolve().name or model)


def run_server(
    model: str,
    config: EngineConfig,
    *,
    server_name: str = "127.0.0.1",
    server_port: int = 23333,
    model_name: str | None = None,
    api_keys: Sequence[str] = (),
    log_level: str = "INFO",
    hang_timeout: float = HANG_TIMEOUT,
) -> None:
    """Serve MODEL until SIGINT or SIGTERM."""
    sock = bind(server_name, server_port)
    try:
        name = model_name or default_model_name(model)
        engine = create_engine(model, config)
        try:
            host = f"[{server_name}]" if ":" in server_name else server_name
            ready = f"{name} is ready at http://{host}:{sock.getsockname()[1]}/v1 (engine {engine.info.name})"
            settings = uvicorn.Config(
                create_app(engine, name, api_keys, hang_timeout=hang_timeout),
                log_level=log_level.lower(),
                access_log=log_level.upper() == "DEBUG",
                log_config=None,
                lifespan="off",
                timeout_graceful_shutdown=GRACE,
            )
            _Server(settings, ready).run([sock])
        finally:
            engine.close()
    finally:
        sock.close()
