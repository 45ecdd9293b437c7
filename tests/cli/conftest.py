"""A tiny model for the command line, and `turbomill` as a process."""

import io
import os
import subprocess
import sys

import pytest

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random Llama in fp16 over bytes, context 256."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).half().save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_store(tiny, tmp_path_factory):
    from turbomill.convert.store import convert_checkpoint

    return convert_checkpoint(tiny, tmp_path_factory.mktemp("stores") / "tiny").path


@pytest.fixture
def cache(tmp_path_factory):
    """Stores and reference logits of the tests go nowhere else."""
    return tmp_path_factory.getbasetemp() / "turbomill-cache"


@pytest.fixture
def folder(tmp_path):
    """The empty folder that commands run in."""
    path = tmp_path / "here"
    path.mkdir()
    return path


@pytest.fixture
def turbomill(folder, cache, monkeypatch, capfd):
    """`turbomill ...` in this process (importing torch for each would take minutes), as main() runs it."""
    from turbomill.__main__ import main

    def run(*arguments, input=None):
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("TURBOMILL_CACHE", str(cache))
            patch.setattr(sys, "argv", ["turbomill", *map(str, arguments)])
            if input is not None:
                patch.setattr(sys, "stdin", io.StringIO(input))
            capfd.readouterr()
            try:
                main()
                code = 0
            except SystemExit as done:
                code = done.code or 0
            out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    run.folder = folder
    return run


@pytest.fixture
def process(folder, cache):
    """The same in a process of its own."""

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "turbomill", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
            env=os.environ | {"TURBOMILL_CACHE": str(cache)},
        )

    return run
