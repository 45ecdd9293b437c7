"""The server over an engine on the GPU: answers over HTTP, and what clients see when the GPU fails."""

from __future__ import annotations

from typing import Any

import pytest
from apart import run_apart

for name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(name)

# In a process of its own, whose CUDA context it spoils. Half of the clients read streams.
BROKEN = """
import json, sys, threading, time
from pathlib import Path
import httpx
from server_thread import serving
from turbomill import EngineConfig, _core
from turbomill.engine.select import create_engine

path, backend = Path(sys.argv[1]), sys.argv[2]
COUNT = 400 if backend == "turbomind" else 60
config = EngineConfig(backend=backend, device="cuda", session_len=512, max_batch_size=4)
engine = create_engine(path, config)
body = {"model": "tiny", "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
prompts = [[3 + i] * (9 + i) for i in range(12)]  # more than run at a time


class Client(threading.Thread):
    def __init__(self, url, prompt, stream):
        super().__init__()
        self.url, self.prompt, self.stream = url, prompt, stream
        self.text, self.error, self.whole = "", None, False

    def run(self):
        sent = {**body, "prompt": self.prompt, "stream": self.stream}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=sent, timeout=60) as answer:
            if not self.stream:
                found = json.loads(answer.read())
                self.error = found.get("error")
                assert (answer.status_code == 500) == bool(self.error)
                if not self.error:
                    self.text, self.whole = found["choices"][0]["text"], True
                return
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.whole = True
                elif data:
                    event = json.loads(data)
                    self.error = self.error or event.get("error")
                    self.text += "".join(choice["text"] for choice in event.get("choices", []))


with serving(engine) as url:
    first = [Client(url, prompt, False) for prompt in prompts]
    for client in first:
        client.start()
    for client in first:
        client.join()
        assert client.whole, client.error
    expected = [client.text for client in first]
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert health.json()["backend"] == "cuda:0" and health.json()["engine"] == backend
    clients = [Client(url, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)]
    for client in clients:
        client.start()
    while not (clients[0].text and clients[2].text):
        time.sleep(0.001)
    _core.kernels_cuda.break_gpu()
    for client in clients:
        client.join()
    failed = 0
    for client, text in zip(clients, expected):
        assert text.startswith(client.text), "a wrong token"
        assert client.whole == (client.error is None)
        if client.error:
            failed += 1
            assert "CUDA" in client.error["message"] and "\\n" not in client.error["message"], client.error
            assert client.error["type"] == "server_error"
        else:
            assert client.text == text
    assert failed >= 4, failed  # at least the last of those that waited
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "unhealthy"), health.text
    assert "turbomill_engine_healthy 0.0" in httpx.get(f"{url}/metrics").text
    later = Client(url, prompts[0], False)
    later.run()
    assert later.error and "CUDA" in later.error["message"] and not later.text
engine.close()
print(f"as it should be: {failed} of {len(clients)} failed")
"""


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_a_broken_gpu_fails_every_request_and_makes_health_fail(backend: str, tiny_store: Any) -> None:
    run_apart(BROKEN, str(tiny_store.path), backend)
