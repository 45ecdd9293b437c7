"""Tiny random Llama checkpoints with a byte tokenizer."""

from pathlib import Path

import torch

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


def byte_tokenizer(template: str | None = CHAT):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # no pad token, on purpose
    fast.chat_template = template
    return fast


def make_model(
    path: Path, dtype=torch.float16, seed=0, hidden=64, inter=128, outliers=True, **changes
) -> Path:
    """Save a random model whose activations have a few large channels, as real ones do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name and outliers:
                parameter.copy_(torch.exp(torch.randn_like(parameter)))
            elif parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.to(dtype).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
