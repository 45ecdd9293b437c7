"""Fixtures: a tiny random model over the byte tokenizer, as a checkpoint and as a store."""

import pytest
from byte_tokenizer import byte_tokenizer


def save_tiny(path, seed):
    """A random Llama of two layers in fp32, over the byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # logits far apart, so that rounding does not change the greedy token
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A tiny model."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def tiny_store(tiny_checkpoint, tmp_path_factory):
    """The same as a store."""
    from turbomill.convert.store import convert_checkpoint

    return convert_checkpoint(tiny_checkpoint, tmp_path_factory.mktemp("stores") / "tiny")


@pytest.fixture(scope="session")
def other_tiny_store(tmp_path_factory):
    """A store of the same form with other weights."""
    from turbomill.convert.store import convert_checkpoint

    path = save_tiny(tmp_path_factory.mktemp("other"), seed=1)
    return convert_checkpoint(path, tmp_path_factory.mktemp("stores") / "other")
