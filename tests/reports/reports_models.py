"""Tiny random Llama checkpoints over a byte tokenizer, and records for tests that run no model."""

from pathlib import Path

from turbomill.reports.runs import KvPolicy, ModelCard, Run, Speed, Variant

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT
    return fast


def make_model(path: Path, seed: int = 0, **changes) -> Path:
    """A random model that is sure of what it says: logits are far apart."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).half().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def card(name="fp16", scheme=None, disk=270_000_000) -> ModelCard:
    return ModelCard(
        name=name,
        path=f"/models/{name}",
        fingerprint="f" * 64,
        architecture="LlamaForCausalLM",
        scheme=scheme,
        disk_bytes=disk,
        vocab_size=49152,
    )


def policy(bits=16, ppl=12.0, kl=0.0, tok_s=40.0, rotation=False) -> KvPolicy:
    return KvPolicy(
        name=str(bits),
        quant_policy=0 if bits == 16 else bits,
        rotation=rotation,
        bytes_per_token=23040 * bits / 16,
        bits_per_token=8 * 23040 * bits / 16,
        ppl=ppl,
        kl=kl,
        top1=0.9,
        decode_tok_s=tok_s,
    )


def variant(name="fp16", scheme=None, ppl=11.97, kl=0.0, disk=270_000_000, tok_s=40.0) -> Variant:
    return Variant(
        name=name,
        model=card(name, scheme, disk),
        ppl=ppl,
        kl=kl,
        top1=1.0 - kl,
        disk_bytes=disk,
        peak_bytes=disk + 300_000_000,
        decode_tok_s=tok_s,
        kv={str(b): policy(b, ppl + 16 / b - 1, kl + 0.001 * (16 / b - 1), tok_s) for b in (16, 8, 4)},
    )


PROVENANCE = {
    "command": "turbomill demo",
    "time": "2026-11-30T10:00:00Z",
    "versions": {"python": "3.11", "turbomill": "0.1.0"},
    "machine": {"cpu": "a cpu", "cores": 2, "system": "Linux"},
    "settings": {"windows": 8},
}


def demo_run() -> Run:
    return Run(
        kind="demo",
        model=card(),
        variants=[
            variant(),
            variant("rtn", "gptq w4g64asym", 15.7, 0.2971, 120_000_000, 70.0),
            variant("awq", "awq w4g64asym", 13.6, 0.1389, 120_000_000, 71.0),
            variant("gptq", "gptq w4g64asym", 13.3, 0.1212, 120_000_000, 72.0),
        ],
        question="What is the capital of France?",
        answer="The capital of France is Paris.",
        provenance=PROVENANCE,
    )


def bench_run() -> Run:
    speeds = [
        Speed(
            batch=b,
            prompt_tokens=128,
            completion_tokens=64,
            prefill_tok_s=500,
            decode_tok_s=40.0 * b,
            rounds=3,
        )
        for b in (1, 4)
    ]
    return Run(kind="bench_engine", model=card(), engine=speeds, provenance=PROVENANCE)
