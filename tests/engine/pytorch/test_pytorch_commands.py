"""A model that the native engine does not know, from the command line to the API, with --backend pytorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from server_thread import serving
from torch_models import logits_of, make, text

from turbomill import EngineConfig, GenerationConfig, pipeline
from turbomill.cli import cli
from turbomill.engine.select import create_engine
from turbomill.errors import UnsupportedModelError

CONFIG = EngineConfig(backend="pytorch", session_len=128, num_threads=1, device="cpu")
NAMED = r"GPT2LMHeadModel is not supported; nearest supported: .*--backend pytorch"
OPTIONS = ["--backend", "pytorch", "--num-threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("commands") / "my-gpt2"
    make("gpt2", found)
    return found


def test_the_native_engine_names_the_other_one(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=NAMED):
        create_engine(path, EngineConfig())


async def test_served_with_logprobs_grammar_and_health(path: Path) -> None:
    engine = create_engine(path, CONFIG)
    try:
        with serving(engine, "my-gpt2") as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
                request: Any = {"model": "my-gpt2", "prompt": text(20), "temperature": 0, "max_tokens": 6}
                whole = await client.completions.create(**request, logprobs=2)
                assert whole.usage is not None and whole.usage.completion_tokens == 6
                pieces = [
                    c.choices[0].text async for c in await client.completions.create(**request, stream=True)
                ]
                assert "".join(pieces) == whole.choices[0].text
                chosen = await client.chat.completions.create(
                    model="my-gpt2",
                    messages=[{"role": "user", "content": "Yes or no?"}],
                    extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
                )
                assert chosen.choices[0].message.content in ("yes", "no")
            async with httpx.AsyncClient() as http:
                health = (await http.get(f"{url}/health")).json()
                metrics = (await http.get(f"{url}/metrics")).text
        assert (health["engine"], health["backend"], health["status"]) == ("pytorch", "cpu", "ok")
        assert health["reason"] == "backend pytorch was asked for" and health["kv_cache"] == "float32"
        assert "turbomill_engine_healthy 1.0" in metrics
    finally:
        engine.close()


def test_pipeline_says_what_transformers_says(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path).eval()
    prompts = [text(10), text(30, seed=1)]
    with pipeline(path, CONFIG) as pipe:
        responses = pipe(prompts, GenerationConfig(max_new_tokens=6, ignore_eos=True))
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = list(response.token_ids)
        own = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1]
        assert own.argmax(1).tolist() == tokens


def test_chat_and_bench_from_the_command_line(path: Path, tmp_path: Path) -> None:
    chat = CliRunner().invoke(
        cli, ["chat", str(path), *OPTIONS, "--max-new-tokens", "4", "--seed", "1"], input="hi\nexit\n"
    )
    assert chat.exit_code == 0 and chat.stdout.strip()
    refused = CliRunner().invoke(cli, ["chat", str(path), *OPTIONS, "--quant-policy", "8"], input="hi\n")
    assert refused.exit_code != 0 and "--quant-policy" in str(refused.exception)
    sizes = ["--concurrency", "2", "--prompt-tokens", "16", "--completion-tokens", "4", "--test-round", "1"]
    bench = CliRunner().invoke(
        cli, ["bench", "engine", str(path), *OPTIONS[:4], *sizes, "--work-dir", str(tmp_path), "--json"]
    )
    assert bench.exit_code == 0, bench.output
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["model"]["architecture"] == "GPT2LMHeadModel" and found["model"]["vocab_size"] == 257
    assert found["provenance"]["settings"]["backend"] == "pytorch"
    assert found["engine"][0]["decode_tok_s"] > 0


def test_bench_serve_starts_a_server_of_this_engine(path: Path, tmp_path: Path) -> None:
    load = ["--num-prompts", "3", "--random-input-len", "12", "--random-output-len", "4", "--json"]
    common = ["bench", "serve", "--backend", "pytorch", "--num-threads", "1", *load]
    bench = CliRunner().invoke(cli, [*common, str(path), "--work-dir", str(tmp_path)])
    assert bench.exit_code == 0, bench.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["model"]["architecture"] == "GPT2LMHeadModel"
    assert run["provenance"]["settings"]["backend"] == "pytorch"
    assert (run["serve"][0]["completed"], run["serve"][0]["total_output_tokens"]) == (3, 12)
    refused = CliRunner().invoke(cli, [*common, "--base-url", "http://127.0.0.1:9"])
    assert refused.exit_code != 0 and "--backend" in str(refused.exception)
