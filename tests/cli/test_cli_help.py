"""The command line itself: light, complete, and forgiving about dashes."""

import json
import re
import subprocess
import sys

import pytest

from turbomill.cli import COMMANDS

HEAVY = ("torch", "transformers", "numpy", "fastapi", "pydantic", "plotly", "jinja2", "httpx", "datasets")
COMMAND_LINES = [
    ["lite"],
    *(["lite", name] for name in ("calibrate", "rtn", "auto_awq", "auto_gptq", "auto")),
    ["convert"],
    ["inspect"],
    ["diff"],
    ["verify"],
    ["serve"],
    ["serve", "api_server"],
    ["chat"],
    ["eval"],
    ["eval", "ppl"],
    ["eval", "kv"],
    ["eval", "tasks"],
    ["eval", "compare"],
    ["plan"],
    ["bench"],
    ["bench", "engine"],
    ["bench", "serve"],
    ["report"],
    ["sweep"],
    ["runs"],
    ["demo"],
    ["check_env"],
]


def modules_of(*arguments):
    """The command's output, and which heavy modules it had imported."""
    code = (
        "import json, sys; from turbomill.cli import cli; cli(sys.argv[1:], standalone_mode=False); "
        f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    *output, found = run.stdout.splitlines()
    return "\n".join(output), json.loads(found)


def test_help_lists_every_command_and_imports_nothing_heavy():
    output, heavy = modules_of("--help")
    assert heavy == []
    for name in COMMANDS:
        assert re.search(rf"\b{name.replace('_', '[-_]')}\b", output), name


def test_every_command_is_tried_here():
    assert {line[0] for line in COMMAND_LINES} == set(COMMANDS)


@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_help_of_every_command(line):
    output, heavy = modules_of(*line, "--help")
    assert "Usage" in output and heavy == []
    dashed, _ = modules_of(*(part.replace("_", "-") for part in line), "--help")
    assert dashed.split("Usage")[1].split("─")[1:] == output.split("Usage")[1].split("─")[1:]


def test_version(turbomill):
    run = turbomill("--version")
    assert run.returncode == 0 and re.search(r"turbomill.* \d+\.\d+\.\d+", run.stdout)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["nonsense"], "nonsense"),
        (["eval", "nonsense"], "nonsense"),
        (["eval", "ppl"], "MODEL"),
        (["eval", "ppl", "demo", "--nonsense"], "--nonsense"),
        (["bench", "engine", "demo", "--concurrency", "1,x"], "--concurrency"),
        (["report"], "RUN"),
        (["demo", "--windows", "many"], "--windows"),
    ],
)
def test_wrong_usage_is_exit_code_2(turbomill, line, named):
    run = turbomill(*line)
    assert run.returncode == 2 and named in run.stderr and "Traceback" not in run.stderr
    assert run.stdout == ""
