"""How tests/goldens/v2-* were made: `python tests/goldens/make_v2.py DST`. They are never made anew.

v2-minima is of a GGUF file of Q4_1, v2-order of a GPTQ checkpoint with desc_act.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q

from turbomill.convert.store import convert_checkpoint

HIDDEN, INTER, VOCAB, GROUP = 64, 128, 96, 32
SHAPES = {  # (N, K)
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gguf_file(path: Path, kind: Q = Q.Q4_1, table: Q = Q.F16) -> None:
    """A random Llama, its linears in `kind`, its embedding in `table`."""
    rng = np.random.default_rng(2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    embedding = gguf.quants.quantize(rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32), table)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=table)
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    for name, shape in SHAPES.items():
        weight = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32) * 0.1, kind)
        writer.add_tensor(f"{names.get_name(f'model.layers.0.{name}')}.weight", weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gptq_checkpoint(path: Path) -> None:
    """A random Llama in GPTQ v2 whose rows desc_act has reordered, those of q, k and v alike."""
    from safetensors.torch import save_file

    torch.manual_seed(2)
    path.mkdir()
    quant = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
    config = SIZES | {"quantization_config": quant | {"checkpoint_format": "gptq_v2"}, "dtype": "float16"}
    (path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).half()}
    for norm in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"model.{norm}.weight"] = (torch.rand(HIDDEN) + 0.5).half()
    orders = {k: (torch.arange(k) // GROUP)[torch.randperm(k)].int() for k in (HIDDEN, INTER)}
    for name, (n, k) in SHAPES.items():
        prefix = f"model.layers.0.{name}"
        tensors[f"{prefix}.qweight"] = torch.randint(-(2**31), 2**31, (k // 8, n)).int()
        tensors[f"{prefix}.qzeros"] = torch.randint(-(2**31), 2**31, (k // GROUP, n // 8)).int()
        tensors[f"{prefix}.scales"] = (torch.rand(k // GROUP, n) * 0.01 + 1e-3).half()
        tensors[f"{prefix}.g_idx"] = orders[k].clone()
    save_file(tensors, path / "model.safetensors")


def neutral_store(source: Path, dst: Path, maker: str) -> None:
    """A store without where and when it was made, which would only distract."""
    manifest = convert_checkpoint(source, dst).manifest
    origin = {**manifest["source"], "path": "a random model"}
    neutral = {**manifest, "source": origin, "provenance": {"command": f"tests/goldens/{maker}"}}
    (dst / "store.json").write_text(json.dumps(neutral, separators=(",", ":")) + "\n")


def make(dst: Path) -> None:
    """Both stores."""
    with tempfile.TemporaryDirectory() as temp:
        gguf_file(Path(temp, "m.gguf"))
        gptq_checkpoint(Path(temp, "gptq"))
        for name, source in (("v2-minima", "m.gguf"), ("v2-order", "gptq")):
            neutral_store(Path(temp, source), dst / name, "make_v2.py")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
