"""How tests/goldens/v1-experts was made: `python tests/goldens/make_v1_experts.py DST`. Never made anew."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.gptq import GptqFormat
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.store import convert_checkpoint
from turbomill.convert.writer import CheckpointWriter


def make(dst: Path) -> None:
    """A random GPTQ model: hidden 64, one layer of four experts and a shared one, symmetric, group 64."""
    torch.manual_seed(2)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    form = GptqFormat(QuantScheme(4, 64, True), version=2)
    with tempfile.TemporaryDirectory() as temp:
        Qwen2MoeForCausalLM(config).half().save_pretrained(Path(temp, "dense"))
        source = open_checkpoint(Path(temp, "dense"))
        quantized = {**source.config, "quantization_config": form.quantization_config()}
        prefixes = source.arch.linear_prefixes(source.config)
        with CheckpointWriter(Path(temp, "gptq"), quantized) as writer:
            for name in source.names():
                if name.rpartition(".")[0] not in prefixes or name.endswith(".bias"):
                    writer.add(name, source.tensor(name))
            for prefix in prefixes:
                n, k = source.shape(f"{prefix}.weight")
                linear = QuantLinear(
                    codes=torch.randint(0, 16, (k, n), dtype=torch.uint8),
                    scales=(torch.rand(k // 64, n) * 0.01 + 1e-3).half(),
                    zeros=torch.full((k // 64, n), 8, dtype=torch.uint8),
                    scheme=form.scheme,
                )
                for name, tensor in form.pack(prefix, linear).items():
                    writer.add(name, tensor)
        store = convert_checkpoint(Path(temp, "gptq"), dst)
    # Where and when it was made would only distract.
    source_info = {"path": "a random model", "fingerprint": store.manifest["source"]["fingerprint"]}
    made = {"command": "tests/goldens/make_v1_experts.py"}
    neutral = {**store.manifest, "source": source_info, "provenance": made}
    (dst / "store.json").write_text(json.dumps(neutral, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
