"""The calibration sets that LMDeploy names, streamed from the hub through `datasets`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from turbomill.calib_data.files import document
from turbomill.errors import TurbomillError


@dataclass(frozen=True)
class HubSet:
    """Where a set lives, and which fields of a row make its text (none: text, content or chat messages)."""

    repo: str
    config: str | None = None
    calibration: str = "train"
    evaluation: str | None = None  # None: no second split; even rows calibrate and odd rows evaluate
    fields: tuple[str, ...] = ()
    data_files: tuple[tuple[str, str], ...] = ()
    revision: str | None = None


HUB_SETS = {
    "wikitext2": HubSet("Salesforce/wikitext", "wikitext-2-raw-v1", evaluation="test"),
    "c4": HubSet(
        "allenai/c4",
        evaluation="validation",
        data_files=(
            ("train", "en/c4-train.00000-of-01024.json.gz"),
            ("validation", "en/c4-validation.00000-of-00008.json.gz"),
        ),
    ),
    # A script-based repository: the hub's own parquet conversion is what today's `datasets` can read.
    "ptb": HubSet(
        "ptb-text-only/ptb_text_only",
        "penn_treebank",
        evaluation="test",
        fields=("sentence",),
        revision="refs/convert/parquet",
    ),
    "pileval": HubSet("mit-han-lab/pile-val-backup", calibration="validation"),
    "gsm8k": HubSet("openai/gsm8k", "main", evaluation="test", fields=("question", "answer")),
    "neuralmagic_calibration": HubSet("neuralmagic/calibration", "LLM"),
    "open-platypus": HubSet("garage-bAInd/Open-Platypus", fields=("instruction", "output")),
    "openwebtext": HubSet("Skylion007/openwebtext"),
}


def stream(name: str, split: str, tokenizer: Any) -> Iterator[str]:
    """The documents of one of HUB_SETS, in order, read only as far as the caller goes.

    Raises TurbomillError, in one line, when the hub cannot be reached.
    """
    source = HUB_SETS[name]
    halves = source.evaluation is None
    rows_split = source.calibration if halves or split == "calibration" else source.evaluation
    try:
        _check_reachable()
        import datasets

        rows = datasets.load_dataset(
            source.repo,
            source.config,
            split=rows_split,
            data_files=dict(source.data_files) or None,
            revision=source.revision,
            streaming=True,
        )
        for number, row in enumerate(rows):
            if halves and number % 2 != (split == "evaluation"):
                continue
            yield _text(dict(row), source.fields, f"{source.repo} row {number}", tokenizer)
    except TurbomillError:
        raise
    except Exception as error:  # datasets, httpx and the hub client each raise their own kinds
        detail = (str(error).strip().splitlines() or [""])[0][:120]
        raise TurbomillError(
            f"--calib-dataset {name}: cannot read {source.repo} from the hub "
            f"({type(error).__name__}: {detail}); "
            "without a network use builtin, self, or a local .txt, .jsonl or .parquet file"
        ) from None


def _text(row: dict[str, Any], fields: tuple[str, ...], where: str, tokenizer: Any) -> str:
    if fields:
        return "\n".join(str(row[field]) for field in fields)
    return document(row, where, tokenizer)


def _check_reachable() -> None:
    """The hub client retries a dead network for half a minute, line by line: find out in one look-up
    instead."""
    from huggingface_hub import constants

    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied or constants.is_offline_mode():  # offline mode reads the local cache
        return
    host = urlsplit(constants.ENDPOINT).hostname or ""
    socket.getaddrinfo(host, 443)
