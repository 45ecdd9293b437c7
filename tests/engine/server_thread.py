"""A uvicorn server in a thread, on a free port of 127.0.0.1."""

import threading
from contextlib import contextmanager

import uvicorn

from turbomill.engine.server import create_app
from turbomill.engine.server.run import bind


@contextmanager
def serving(engine, model_name="tiny", **options):
    """Yield the server's URL."""
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(engine, model_name, **options),
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()
