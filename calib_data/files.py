"""Local texts: .txt, .jsonl and .parquet files, or a folder of them, of plain text or chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turbomill.errors import TurbomillError

SUFFIXES = (".txt", ".jsonl", ".parquet")
TEXT_KEYS = ("text", "content")
CHAT_KEYS = ("messages", "conversations")
# ShareGPT's spelling of a message's fields and roles.
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}


def read_path(path: Path, tokenizer: Any) -> Iterator[str]:
    """The documents of a file, or of every known file below a folder in sorted order.

    `tokenizer` renders chat messages with its chat template. Raises TurbomillError naming the file and line.
    """
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not found:
            raise TurbomillError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
        for file in found:
            yield from read_path(file, tokenizer)
        return
    if not path.is_file():
        raise TurbomillError(f"{path}: no such file or folder")
    if path.suffix not in SUFFIXES:
        raise TurbomillError(f"{path}: unknown kind of file, expected {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise TurbomillError(f"{path}: the file is empty, expected text for calibration")
    if path.suffix == ".txt":
        yield _decode(path)
    elif path.suffix == ".jsonl":
        yield from _read_jsonl(path, tokenizer)
    else:
        yield from _read_parquet(path, tokenizer)


def document(row: Mapping[str, Any], where: str, tokenizer: Any) -> str:
    """The text of one record: its `text` or `content`, or its `messages` through the chat template."""
    for key in TEXT_KEYS:
        if isinstance(row.get(key), str):
            return row[key]
    for key in CHAT_KEYS:
        if row.get(key) is not None:
            return _render(list(row[key]), where, tokenizer)
    expected = ", ".join((*TEXT_KEYS, *CHAT_KEYS))
    raise TurbomillError(f"{where}: none of the fields {expected}, found {', '.join(row) or 'no field'}")


def _render(messages: list[Any], where: str, tokenizer: Any) -> str:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise TurbomillError(
            f"{where}: chat messages need a chat template, and the tokenizer has none: use plain text"
        )
    chat = []
    for message in messages:
        role = message.get("role") or message.get("from") if isinstance(message, Mapping) else None
        content = message.get("content") or message.get("value") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise TurbomillError(f"{where}: a message needs a role and a content that are strings")
        chat.append({"role": ROLES.get(role, role), "content": content})
    return tokenizer.apply_chat_template(chat, tokenize=False)


def _decode(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TurbomillError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _read_jsonl(path: Path, tokenizer: Any) -> Iterator[str]:
    for number, line in enumerate(_decode(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TurbomillError(f"{where}: not a JSON document ({error.msg})") from None
        if not isinstance(row, dict):
            raise TurbomillError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield document(row, where, tokenizer)


def _read_parquet(path: Path, tokenizer: Any) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    yield document(row, f"{path}: row {number}", tokenizer)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise TurbomillError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
