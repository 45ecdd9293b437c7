"""Tiny random Llama checkpoints, dense and quantized."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.base import WeightFormat
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.writer import CheckpointWriter

TINY = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """`tiny(name="a", dtype=..., **config)` saves a random Llama model and returns its directory."""

    def make(name: str = "tiny", dtype: torch.dtype = torch.float16, shard: str = "5GB", **fields) -> Path:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**TINY, **fields})).to(dtype)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            if "norm" in key:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
        return tmp_path / name

    return make


def random_linear(
    k: int, n: int, scheme: QuantScheme, bias: bool = False, dtype: torch.dtype = torch.float16
) -> QuantLinear:
    groups, top = -(-k // scheme.group), 2**scheme.bits
    zeros = torch.randint(0, top, (groups, n), dtype=torch.uint8)
    return QuantLinear(
        codes=torch.randint(0, top, (k, n), dtype=torch.uint8),
        scales=(torch.rand(groups, n) * 0.01 + 1e-3).to(dtype),
        zeros=torch.full_like(zeros, top // 2) if scheme.symmetric else zeros,
        scheme=scheme,
        bias=torch.randn(n).to(dtype) if bias else None,
    )


@pytest.fixture
def make_linear() -> Callable[..., QuantLinear]:
    return random_linear


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, QuantLinear]]]:
    """Replace a dense checkpoint's linears by random quantized ones; returns the directory and those."""

    def make(
        dense: Path, form: WeightFormat, keep: tuple[str, ...] = ()
    ) -> tuple[Path, dict[str, QuantLinear]]:
        source = open_checkpoint(dense)
        config = {**source.config, "quantization_config": form.quantization_config()}
        shapes, biases = source.arch.linear_shapes(source.config), source.arch.linear_biases(source.config)
        linears: dict[str, QuantLinear] = {}
        dst = tmp_path / f"{dense.name}-{form.name}"
        prefixes = source.arch.linear_prefixes(source.config)
        with CheckpointWriter(dst, config) as writer:
            for name in source.names():
                prefix = name.rpartition(".")[0]
                if prefix not in prefixes or any(part in prefix for part in keep):
                    writer.add(name, source.tensor(name))
            for prefix in prefixes:
                if any(part in prefix for part in keep):
                    continue
                part = prefix.split(".", 3)[3]
                k, n = shapes[part]
                scheme = form.scheme_of(prefix, k)
                assert scheme is not None
                linears[prefix] = random_linear(k, n, scheme, biases[part], source.dtype)
                for name, tensor in form.pack(prefix, linears[prefix]).items():
                    writer.add(name, tensor)
        return dst, linears

    return make
