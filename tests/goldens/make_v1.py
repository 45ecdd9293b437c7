"""How tests/goldens/v1 was made: `python tests/goldens/make_v1.py DST`. It is never made anew."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.convert.formats.awq import AwqFormat
from turbomill.convert.linear import QuantLinear, QuantScheme
from turbomill.convert.store import convert_checkpoint
from turbomill.convert.writer import CheckpointWriter


def make(dst: Path) -> None:
    """A random AWQ model: hidden 64, one layer, vocabulary 128, group 64, attention biases, untied head."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attention_bias=True,
    )
    form = AwqFormat(QuantScheme(4, 64, False))
    with tempfile.TemporaryDirectory() as temp:
        LlamaForCausalLM(config).half().save_pretrained(Path(temp, "dense"))
        source = open_checkpoint(Path(temp, "dense"))
        quantized = {**source.config, "quantization_config": form.quantization_config()}
        prefixes = source.arch.linear_prefixes(source.config)
        with CheckpointWriter(Path(temp, "awq"), quantized) as writer:
            for name in source.names():
                if name.rpartition(".")[0] not in prefixes:
                    writer.add(name, source.tensor(name))
            for prefix in prefixes:
                n, k = source.shape(f"{prefix}.weight")
                linear = QuantLinear(
                    codes=torch.randint(0, 16, (k, n), dtype=torch.uint8),
                    scales=(torch.rand(k // 64, n) * 0.01 + 1e-3).half(),
                    zeros=torch.randint(0, 16, (k // 64, n), dtype=torch.uint8),
                    scheme=form.scheme,
                    bias=torch.randn(n).half() if "self_attn" in prefix else None,
                )
                for name, tensor in form.pack(prefix, linear).items():
                    writer.add(name, tensor)
        store = convert_checkpoint(Path(temp, "awq"), dst)
    # Where and when it was made would only distract.
    source_info = {"path": "a random model", "fingerprint": store.manifest["source"]["fingerprint"]}
    neutral = {**store.manifest, "source": source_info, "provenance": {"command": "tests/goldens/make_v1.py"}}
    (dst / "store.json").write_text(json.dumps(neutral, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
