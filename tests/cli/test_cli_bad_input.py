"""Bad input is one line that says what to do, the right exit code, and nothing half-written."""

import json
import shutil
import socket

import pytest

CORE = pytest.mark.usefixtures("core")


@pytest.fixture
def core():
    pytest.importorskip("turbomill._core")


def check(run, code, *words):
    """One error line that has every word; no traceback; nothing on stdout."""
    assert run.returncode == code, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in run.stderr and "a bug in turbomill" not in run.stderr
    for word in words:
        assert str(word) in lines[0], lines[0]
    assert run.stdout == ""


def nothing_written(turbomill):
    return list(turbomill.folder.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "--dst-path", "out"],
        ["lite", "rtn", "--work-dir", "out"],
        ["inspect"],
        ["eval", "ppl"],
        ["eval", "kv"],
        ["bench", "engine"],
        ["bench", "serve"],
        ["demo", "--model"],
        ["serve", "api_server", "--server-port", "0"],
    ],
    ids=" ".join,
)
def test_missing_model(turbomill, command):
    check(turbomill(*command, "/no/such/model"), 1, "/no/such/model", "no such file", "demo")
    assert nothing_written(turbomill)


@pytest.fixture
def truncated(tiny, tmp_path):
    """The tiny checkpoint with half of its weights' file."""
    path = tmp_path / "truncated"
    shutil.copytree(tiny, path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return path


@pytest.mark.parametrize(
    "command",
    [["convert", "--dst-path", "out"], ["lite", "rtn", "--work-dir", "out"], ["eval", "ppl"]],
    ids=" ".join,
)
def test_truncated_safetensors(turbomill, truncated, command):
    check(turbomill(*command, truncated), 1, "model.safetensors")
    assert nothing_written(turbomill)


@pytest.mark.parametrize("command", [["convert", "--dst-path", "out"], ["inspect"], ["bench", "engine"]])
def test_truncated_gguf(turbomill, tmp_path, command):
    import gguf
    import numpy as np

    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.write_bytes(file.read_bytes()[:-2000])
    check(turbomill(*command, file), 1, file.name)
    assert nothing_written(turbomill)


@pytest.fixture
def half_written(tiny_store, tmp_path):
    path = tmp_path / "half"
    shutil.copytree(tiny_store, path)
    (path / "store.json").unlink()
    (path / "config.json").unlink(missing_ok=True)
    return path


@pytest.mark.parametrize(
    "command", [["inspect"], ["eval", "ppl"], ["bench", "engine"], ["serve", "api_server"]], ids=" ".join
)
def test_half_written_store(turbomill, half_written, command):
    check(turbomill(*command, half_written), 1, half_written, "half-written", "again")


def test_store_with_a_short_shard(turbomill, tiny_store, tmp_path):
    path = tmp_path / "short"
    shutil.copytree(tiny_store, path)
    (shard,) = path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    check(turbomill("eval", "ppl", path), 1, shard.name)


@pytest.mark.parametrize("method", ["rtn", "auto_awq", "auto_gptq"])
def test_group_that_does_not_divide(turbomill, tiny, method):
    run = turbomill("lite", method, tiny, "--work-dir", "out", "--w-group-size", "48")
    check(run, 2, "--w-group-size 48", "does not divide", "use --w-group-size 64 or --w-group-size 32")
    assert nothing_written(turbomill)


@pytest.mark.parametrize("command", [["convert", "--dst-path", "out"], ["lite", "rtn", "--work-dir", "out"]])
def test_unknown_architecture(turbomill, tiny, tmp_path, command):
    path = tmp_path / "unknown"
    shutil.copytree(tiny, path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["WarpForCausalLM"], "model_type": "warp"}
    (path / "config.json").write_text(json.dumps(config))
    check(turbomill(*command, path), 1, "WarpForCausalLM")
    assert nothing_written(turbomill)


@pytest.mark.parametrize("content", ["", "   \n"])
def test_empty_calibration_file(turbomill, tiny, content):
    file = turbomill.folder.parent / "empty.txt"
    file.write_text(content)
    check(
        turbomill(
            "lite", "auto_gptq", tiny, "--work-dir", "out", "--w-group-size", 64, "--calib-dataset", file
        ),
        1,
        file,
    )
    assert nothing_written(turbomill)


@CORE
def test_port_in_use(turbomill, tiny_store):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = turbomill("serve", "api_server", tiny_store, "--server-port", port)
    check(run, 1, f"127.0.0.1:{port}", "--server-port")


@CORE
def test_prompt_longer_than_the_session(turbomill, tiny_store):
    run = turbomill("chat", tiny_store, "--session-len", 32, input="word " * 40 + "\n")
    check(run, 2, "tokens, but a session holds 32", "--session-len")


@CORE
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "engine", "--prompt-tokens", 300], ["--prompt-tokens", "256"]),
        (["bench", "engine", "--concurrency", 0], ["--concurrency 0"]),
        (["bench", "serve", "--random-input-len", 300], ["--random-input-len", "256"]),
        (["eval", "ppl"], ["--window-len 1024", "256"]),
        (["eval", "ppl", "--windows", 0], ["--windows 0"]),
        (["eval", "kv", "--window-len", 1], ["--window-len 1"]),
        (["eval", "ppl", "--window-len", 64, "--dataset", "no-such-set"], ["no-such-set", "builtin"]),
    ],
)
def test_sizes_that_do_not_fit(turbomill, tiny_store, arguments, words):
    check(turbomill(*arguments, tiny_store), 2, *words)


@CORE
def test_too_short_a_text(turbomill, tiny_store):
    file = turbomill.folder.parent / "short.txt"
    file.write_text("Only a few words are here.")
    run = turbomill("eval", "ppl", tiny_store, "--window-len", 64, "--dataset", file, "--work-dir", "run")
    check(run, 1, file, "26 tokens", "--window-len")
    assert nothing_written(turbomill)


def test_no_run_to_report(turbomill):
    check(turbomill("report", "nothing"), 1, "nothing/run.json", "--work-dir")


def test_server_that_is_not_there(turbomill):
    check(turbomill("bench", "serve", "--base-url", "http://127.0.0.1:9"), 1, "http://127.0.0.1:9")


def test_neither_model_nor_server(turbomill):
    check(turbomill("bench", "serve"), 2, "MODEL", "--base-url")


def test_as_a_process(process):
    check(process("convert", "/no/such/model", "--dst-path", "out"), 1, "/no/such/model", "no such file")
    check(process("bench", "serve"), 2, "MODEL", "--base-url")
