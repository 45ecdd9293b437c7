"""`turbomill serve` and `turbomill chat`: options, errors, the conversation. The double runs the model."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from click.testing import CliRunner

from turbomill.cli import cli
from turbomill.engine.chat import Conversation, talk
from turbomill.engine.config import GenerationConfig
from turbomill.engine.server.run import bind
from turbomill.errors import TurbomillError

RUN = [sys.executable, "-m", "turbomill"]


def turbomill(*arguments, **options):
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def fake_model(fake_core, fake_store, monkeypatch):
    """MODEL, whatever its name, is the double."""
    monkeypatch.setattr("turbomill.engine.turbomind.open_model", lambda model: fake_store)


def invoke(*arguments, **options):
    return CliRunner().invoke(cli, arguments, standalone_mode=False, **options)


@pytest.mark.parametrize("command", [["serve", "api_server"], ["serve", "api-server"], ["chat"]])
def test_help_needs_no_heavy_library(command):
    code = (
        "import sys; from turbomill.cli import cli; cli(sys.argv[1:], standalone_mode=False); "
        "print([m for m in ('torch', 'transformers', 'fastapi', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.rstrip().endswith("[]"), result.stdout + result.stderr
    for option in (
        "--session-len",
        "--quant-policy",
        "--cache-max-entry-count",
        "--max-batch-size",
        "--strict",
    ):
        assert option in result.stdout


def test_port_in_use_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = turbomill("serve", "api_server", "/no/such/model", "--server_port", str(port))
    assert result.returncode == 1 and result.stdout == ""
    assert re.fullmatch(rf"error: cannot serve on 127.0.0.1:{port}: .*--server-port.*\n", result.stderr)


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--quant-policy", "5"], 2, "--quant-policy"),
        (["--max-batch-size", "0"], 2, "max_batch_size"),
        (["--cache-max-entry-count", "lots"], 2, "cache_max_entry_count"),
        (["--session-len", "many"], 2, "--session-len"),
        (["--server-port", "0"], 1, "/no/such/model"),
    ],
)
def test_wrong_options_and_models(options, code, word):
    result = turbomill("serve", "api_server", "/no/such/model", *options, "--server-port", "0")
    assert result.returncode == code and word in result.stderr and "Traceback" not in result.stderr


def test_chat_through_a_pipe(fake_model):
    arguments = ["chat", "any", "--temperature", "0", "--max-new-tokens", "5", "--top_k", "3"]
    result = invoke(*arguments, input="hello\n\nagain\nexit\nnot read\n")
    assert result.exception is None
    answers = result.stdout.splitlines()
    assert len(answers) == 2 and all(len(answer) == 5 for answer in answers)


def test_chat_ends_with_its_input(fake_model, fake_core):
    result = invoke(
        "chat", "any", "--max-new-tokens", "3", "--seed", "1", "--system", "Be kind.", input="hello"
    )
    assert result.exception is None and len(result.stdout.splitlines()) == 1
    request = fake_core.Engine.instances[-1].requests[0]
    assert bytes(request.token_ids).decode() == "<|system|>Be kind.\n<|user|>hello\n<|assistant|>"
    assert not fake_core.Engine.instances[-1].thread.is_alive(), "the engine was closed"


def test_conversation_has_a_history(fake_engine):
    conversation = Conversation(fake_engine, GenerationConfig(max_new_tokens=2))
    pieces = []
    first = conversation.say("a", pieces.append)
    conversation.say("b", pieces.append)
    prompt = bytes(fake_engine._engine.requests[-1].token_ids).decode()
    assert prompt == f"<|user|>a\n<|assistant|>{first}\n<|user|>b\n<|assistant|>"
    assert "".join(pieces).startswith(first)


def test_conversation_forgets_the_oldest_when_the_session_is_full(make_fake_engine):
    engine = make_fake_engine(session_len=120)
    conversation = Conversation(engine, GenerationConfig(max_new_tokens=10), "S")
    for letter in "abcdefgh":
        conversation.say(letter * 5, lambda text: None)
    prompt = bytes(engine._engine.requests[-1].token_ids).decode()
    assert prompt.startswith("<|system|>S\n<|user|>") and prompt.endswith("<|user|>hhhhh\n<|assistant|>")
    assert "aaaaa" not in prompt and "ggggg" in prompt and len(prompt) <= 110


def test_interrupting_an_answer_keeps_what_was_said(fake_engine, fake_core, monkeypatch):
    # Eight seconds for the whole answer: even a busy machine interrupts it before its end.
    monkeypatch.setattr(fake_core, "STEP_SECONDS", 0.02)
    conversation = Conversation(fake_engine, GenerationConfig(max_new_tokens=400))
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    # A shell that runs the tests in the background has SIGINT ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = conversation.say("a", write)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 3 <= len(answer) < 400 and pieces[-1] == " [stopped]"
    monkeypatch.setattr(fake_core, "STEP_SECONDS", 0.0)
    assert len(conversation.say("b", lambda text: None)) > 0


def test_server_runs_until_a_signal(fake_model, fake_core, capsys):
    seen = {}

    def client():
        for _ in range(6000):  # a minute: less than that was not enough on a busy machine
            if match := re.search(r"ready at (http://\S+)/v1", capsys.readouterr().err):
                seen["health"] = httpx.get(f"{match[1]}/health").json()
                break
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    from turbomill.engine.config import EngineConfig
    from turbomill.engine.server.run import run_server

    run_server("models/My-Model.gguf", EngineConfig(session_len=64), server_port=0, log_level="WARNING")
    thread.join()
    assert seen["health"]["model"] == "My-Model" and seen["health"]["status"] == "ok"
    assert not fake_core.Engine.instances[-1].thread.is_alive(), "the engine was closed"
    assert signal.getsignal(signal.SIGTERM) is before


def test_chat_at_a_terminal_survives_a_message_that_is_too_long(fake_engine, monkeypatch, capsys):
    lines = iter(["x" * 600, "hi"])

    def fake_input(prompt):
        assert prompt == "> "
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", fake_input)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    talk(Conversation(fake_engine, GenerationConfig(max_new_tokens=3)))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("error: the prompt has") and len(second) == 3


def test_a_server_that_still_loads_owns_its_port():
    with bind("127.0.0.1", 0) as first, pytest.raises(TurbomillError, match="--server-port"):
        bind("127.0.0.1", first.getsockname()[1])
