"""GGUF files of the Llama family, read as a dense Hugging Face checkpoint.

Blocks are dequantized by the `gguf` library. llama.cpp stores q and k with each head's two halves interleaved
(its RoPE rotates neighbours); they are put back in Hugging Face's order here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from turbomill.convert.base import Checkpoint, missing
from turbomill.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedTokenizerBase

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama-3 scaling, as divisors of the inverse frequencies [D/2]


class GgufCheckpoint(Checkpoint):
    """One GGUF file; tensors have Hugging Face names and are dequantized when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        from gguf import GGUFValueType

        reader = _open(path)
        # The vocabulary's arrays are long, and only transformers reads them.
        self._fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not (name.startswith("tokenizer.") and field.types[0] == GGUFValueType.ARRAY)
        }
        self._rope_factors: Tensor | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None  # slow to read, so kept
        self._tensors: dict[str, ReaderTensor] = {}
        for tensor in reader.tensors:
            if tensor.name == ROPE_FACTORS:
                self._rope_factors = torch.from_numpy(np.array(tensor.data, dtype=np.float32))
            else:
                self._tensors[_hf_name(tensor.name)] = tensor
        self._dtype = _model_dtype(self._tensors)
        self.config = self._read_config()

    def _field(self, key: str, default: Any = None) -> Any:
        value = self._fields.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {key} is missing; the file is not a complete model")
        return value

    def _read_config(self) -> dict[str, Any]:
        arch = self._field("general.architecture")
        if arch != "llama":
            raise UnsupportedModelError(
                f"{self.path}: GGUF architecture {arch} is not supported; supported: llama"
            )
        if self._fields.get("llama.expert_count"):
            raise UnsupportedModelError(f"{self.path}: mixture-of-experts GGUF models are not supported")
        if "model.embed_tokens.weight" not in self._tensors:
            raise CheckpointError(
                f"{self.path}: no tensor token_embd.weight; the file is not a complete model"
            )
        hidden, heads = self._field("llama.embedding_length"), self._field("llama.attention.head_count")
        kv_heads = self._field("llama.attention.head_count_kv", heads)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise UnsupportedModelError(
                f"{self.path}: head counts that differ between layers are not supported"
            )
        dim = self._field("llama.attention.key_length", hidden // heads)
        if self._field("llama.rope.dimension_count", dim) != dim:
            raise UnsupportedModelError(f"{self.path}: RoPE over a part of each head is not supported")
        ids = {
            f"{key}_token_id": self._fields.get(f"tokenizer.ggml.{name}_token_id")
            for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._field("llama.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._field("llama.context_length"),
            "rope_parameters": self._rope(dim),
            "attention_bias": self.has("model.layers.0.self_attn.q_proj.bias"),
            "mlp_bias": self.has("model.layers.0.mlp.gate_proj.bias"),
            "tie_word_embeddings": not self.has("lm_head.weight"),
            "dtype": str(self._dtype).removeprefix("torch."),
            **{key: value for key, value in ids.items() if value is not None},
        }

    def _rope(self, dim: int) -> dict[str, Any]:
        theta = float(self._fields.get("llama.rope.freq_base", 10000.0))
        kind = self._fields.get("llama.rope.scaling.type", "none")
        if self._rope_factors is not None:
            return self._llama3_rope(theta, dim)
        if kind == "none" or (kind == "linear" and "llama.rope.scaling.factor" not in self._fields):
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            factor = float(self._fields["llama.rope.scaling.factor"])
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        raise UnsupportedModelError(
            f"{self.path}: llama.rope.scaling.type {kind}: only none, linear and Llama-3's are supported"
        )

    def _llama3_rope(self, theta: float, dim: int) -> dict[str, Any]:
        """The parameters that Llama-3 models were released with, if they give this file's factors."""
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        assert self._rope_factors is not None
        found = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": float(self._rope_factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(
            hidden_size=dim, num_attention_heads=1, head_dim=dim, rope_parameters=dict(found)
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = theta ** (-torch.arange(0, dim, 2).float() / dim)
        if scaled.shape != self._rope_factors.shape or not torch.allclose(
            plain / scaled, self._rope_factors, rtol=1e-4
        ):
            raise UnsupportedModelError(
                f"{self.path}: {ROPE_FACTORS} does not follow Llama-3's scaling (low 1, high 4, length 8192)"
            )
        return found

    def weight_files(self) -> list[Path]:
        """The file itself."""
        return [self.path]

    def names(self) -> list[str]:
        """Hugging Face names."""
        return list(self._tensors)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this Hugging Face name."""
        return name in self._tensors

    def _find(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise missing(self.path, name, self._tensors)
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major: GGUF lists the fastest dimension first."""
        return tuple(int(n) for n in reversed(self._find(name).shape))

    def dtype_of(self, name: str) -> torch.dtype:
        """Always the model's: fp16, or bf16 or fp32 where the matrices are."""
        self._find(name)
        return self._dtype

    def stored(self, name: str) -> tuple[tuple[int, ...], str, str, int]:
        """The block type stands for the dtype."""
        found = self._find(name)
        return self.shape(name), found.tensor_type.name, "gguf", int(found.n_bytes)

    def tensor(self, name: str) -> Tensor:
        """In the model's dtype and Hugging Face's row order. Raises CheckpointError on overflow."""
        from gguf.quants import dequantize

        found = self._find(name)
        try:
            values = dequantize(found.data, found.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {found.name}: type {found.tensor_type.name} cannot be read"
            ) from error
        tensor = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(self.shape(name))
        if ".q_proj." in name or ".k_proj." in name:
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            tensor = _unpermute(tensor, self.config[key])
        if not bool(tensor.abs().max() <= torch.finfo(self._dtype).max):  # also false for NaN
            raise CheckpointError(f"{self.path}: tensor {found.name}: holds values beyond {self._dtype}")
        return tensor.to(self._dtype).contiguous()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Through transformers' reader of GGUF metadata."""
        from transformers import AutoTokenizer

        if self._tokenizer is not None:
            return self._tokenizer
        try:
            found = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except Exception as error:  # transformers raises many types here
            reason = str(error).strip().split("\n", 1)[0]
            raise CheckpointError(f"{self.path}: the tokenizer cannot be read: {reason}") from error
        self._tokenizer = found
        return found

    def generation_config(self) -> dict[str, Any]:
        """Special ids; end-of-turn and end-of-message tokens end a generation too."""
        names = ("eos", "eot", "eom")
        found = [self._fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        eos = list(dict.fromkeys(value for value in found if value is not None))
        ids = {key: self.config[key] for key in ("bos_token_id", "pad_token_id") if key in self.config}
        return {**ids, "eos_token_id": eos} if eos else ids

    def copy_sidecars(self, dst: Path) -> None:
        """Tokenizer files, chat template and generation config, made from the metadata."""
        dst.mkdir(parents=True, exist_ok=True)
        self.tokenizer().save_pretrained(str(dst))
        text = json.dumps(self.generation_config(), indent=2) + "\n"
        (dst / "generation_config.json").write_text(text, encoding="utf-8")


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(path, "c")  # copy-on-write: torch wants writable memory
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: truncated, damaged or not a GGUF file ({str(error).partition(chr(10))[0]}); "
            "copy or download it again"
        ) from error


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    base, _, suffix = name.rpartition(".")
    if base in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[base]}.{suffix}"
    kind, _, rest = base.partition(".")
    index, _, part = rest.partition(".")
    if kind == "blk" and part in LAYER_NAMES:
        return f"model.layers.{index}.{LAYER_NAMES[part]}.{suffix}"
    return name


def _model_dtype(tensors: dict[str, ReaderTensor]) -> torch.dtype:
    """fp16 unless every matrix is bf16 or fp32."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return torch.float32
    return torch.bfloat16 if kinds and kinds <= {"BF16", "F32"} else torch.float16


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's interleaving of each head's halves along the first dimension."""
    halves = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
