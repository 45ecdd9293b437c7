"""A server of ours in a child process, for as long as a `with` block runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from turbomill.errors import TurbomillError

READY = re.compile(r"is ready at (http://\S+?)/v1")
STOP_S = 20


@contextmanager
def server(model: str, name: str, options: Sequence[str] = ()) -> Iterator[str]:
    """Serve MODEL on a free port; yields the URL without /v1. Raises TurbomillError with its reason."""
    command = [sys.executable, "-m", "turbomill", "serve", "api_server", model]
    command += ["--server-port", "0", "--model-name", name, "--log-level", "WARNING", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        last, url = "", ""
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        try:
            for line in process.stderr:
                last = line.strip() or last
                if found := READY.search(line):
                    url = found[1]
                    break
            if not url:
                raise TurbomillError(f"the server did not start: {last.removeprefix('error: ')}")
            drain.start()  # whatever it says must be read, or it waits for a reader
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if drain.ident is not None:
                drain.join()
