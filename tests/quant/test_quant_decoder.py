"""Running a model layer by layer gives what transformers gives for the whole of it."""

import pytest
import torch
from tiny_models import make_model

from turbomill.convert.checkpoint import open_checkpoint
from turbomill.quant.decoder import StreamedDecoder, watching
from turbomill.quant.stream import Stream

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPE["original_max_position_embeddings"] = 64


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"rope_parameters": ROPE, "head_dim": 32}]
)
def test_hidden_states_equal_the_whole_models(tmp_path, changes):
    from transformers import AutoModelForCausalLM

    path = make_model(tmp_path / "m", torch.float32, **changes)
    ids = torch.randint(0, 256, (3, 70))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        expected = model(ids, output_hidden_states=True).hidden_states
    decoder = StreamedDecoder(open_checkpoint(path))
    hidden = decoder.embed(ids.split(2))  # batches of different sizes
    torch.testing.assert_close(torch.cat(hidden), expected[0])
    hidden = [decoder.run(decoder.load(0), 0, batch) for batch in hidden]
    torch.testing.assert_close(torch.cat(hidden), expected[1], rtol=1e-4, atol=1e-5)


def test_a_stage_sees_every_token_once_and_stops_there(tiny):
    decoder = StreamedDecoder(open_checkpoint(tiny))
    hidden = decoder.embed(torch.randint(0, 256, (3, 20)).split(2))
    layer, seen, full = decoder.load(1), [], []
    later = []
    stream = Stream(decoder, list(hidden))
    stream.enter(layer, 1)
    with watching(layer, {"mlp.down_proj": lambda x, _y: later.append(x)}):
        seen = list(stream.inputs("self_attn.o_proj"))
    assert not later
    with watching(layer, {"self_attn.o_proj": lambda x, _y: full.append(x)}):
        for batch in hidden:
            decoder.run(layer, 1, batch)
    assert sum(x.shape[0] * x.shape[1] for x in seen) == 60
    assert all(torch.equal(a, b) for a, b in zip(seen, full, strict=True))
    assert not layer.self_attn.o_proj._forward_pre_hooks


def test_the_attention_is_remembered_until_told_to_forget(tiny):
    decoder = StreamedDecoder(open_checkpoint(tiny))
    hidden = decoder.embed(torch.randint(0, 256, (3, 20)).split(2))
    layer = decoder.load(0)
    expected = [decoder.run(layer, 0, batch) for batch in hidden]
    stream = Stream(decoder, list(hidden))
    stream.enter(layer, 0)
    list(stream.inputs("self_attn.o_proj"))
    runs = []
    with watching(layer, {"self_attn.q_proj": lambda x, _y: runs.append(x)}):
        first = list(stream.inputs("mlp.down_proj"))
        assert not runs
        stream.forget()
        again = list(stream.inputs("mlp.down_proj"))
        assert len(runs) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    list(stream.inputs("self_attn.o_proj"))
    layer.self_attn.o_proj.weight.data *= 1.0  # the stand-in computes with the layer's own linear
    stream.leave()
    assert all(torch.equal(a, b) for a, b in zip(stream.hidden, expected, strict=True))
