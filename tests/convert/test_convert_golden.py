"""A store of every past format version loads for ever, and holds the weights it held."""

import hashlib
from pathlib import Path

from turbomill.convert.store import open_store

V1 = Path(__file__).parents[1] / "goldens" / "v1"
# sha256 of the fp32 values: dequantized [N, K] for the linears, the tensor itself for the rest.
V1_SUMS = {
    "w_qkv": "d58553ffdc876d577172a6ce85906396a7a94fc5bb19bf0223664e8dc7d528a8",
    "w_o": "9db8d0ea1782dd553ff6f697fc13f0996051e3d9843a82f6df74c5da43efe509",
    "w_gate_up": "ba6935cc221268d9bd82b66051f6122037cd18c54c86abbb5b45764285c7c060",
    "w_down": "d17dcc939c1a99f05751ecfbe370064cec75e90d14b525066d9bb74268e429fe",
    "tok_embeddings.weight": "281e00dbbd8c492a65f77747b6505739326d5e005fc34924d979d48824f04306",
    "rope.inv_freq": "dc0f132eed2f8955fe1077d0ccde8dd576d43efe05e3e8dbb806db0539a0c3eb",
    "layers.0.attention_norm.weight": "2f20cd03c9cd392a406c56232b0ff93a15f6d6d7da79086bfa14f55d4a4031b0",
    "layers.0.ffn_norm.weight": "2f20cd03c9cd392a406c56232b0ff93a15f6d6d7da79086bfa14f55d4a4031b0",
    "layers.0.w_qkv.bias": "4950ba8111770de5f3c5e3d7d59be101a3ba7dc7f22e582090fe2736508110a7",
    "layers.0.w_o.bias": "b175b08b058033533a4eabea5c3e4774bc8be7c987b628c0324beae12698c5b0",
    "norm.weight": "2f20cd03c9cd392a406c56232b0ff93a15f6d6d7da79086bfa14f55d4a4031b0",
    "output.weight": "b40b16dac71b739a7ad9b0983e8c02f7dbd0c1af887f0b62b4a87c9019abcf10",
}


def fp32_sum(tensor):
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()


def test_version_1():
    store = open_store(V1)
    assert store.manifest["format_version"] == 1 and store.verify() == []
    assert (store.model["num_layers"], store.context_length, store.eos_token_ids) == (1, 256, [2])
    linears = [name for name in V1_SUMS if name.startswith("w_")]
    found = {name: fp32_sum(store.linear(f"layers.0.{name}").dequantize()) for name in linears}
    found.update({name: fp32_sum(store.tensor(name)) for name in V1_SUMS if name not in linears})
    assert found == V1_SUMS
    quantized = {f"layers.0.{name}.{part}" for name in linears for part in ("qweight", "scales", "zeros")}
    assert set(store.tensors) == set(V1_SUMS) - set(linears) | quantized


EXPERT_SUMS = {
    ("experts.w_gate_up", 0): "4643f6574f553299d61f44e67e91c614a0b39ee60a27f1f282199a586046fd59",
    ("experts.w_gate_up", 1): "3e058941a75fcde559fbb12aa17ed8c06f9c4c8aa422a822460a2297a5d12ec3",
    ("experts.w_gate_up", 2): "9c032c11a10a20ae24330ed877a69a4ac5788cc9f3ec2a8c58ef555c269646d6",
    ("experts.w_gate_up", 3): "1aa597ba7941be8a99e09d9a5492a18f2d525046b6abdbeafec389e1cbf9066b",
    ("experts.w_down", 0): "bb81f0a1a42f048c6b402745bd9ad095b4f0f43700459770c0b77d6fe1785855",
    ("experts.w_down", 1): "22713def3ffcaedc358e40aed244eb37f05afd97eaa18a92b54ccea45228ea42",
    ("experts.w_down", 2): "711536b04ca1d9319f4344e49e31d7f6c7553e66c5f866674349461b32bd6061",
    ("experts.w_down", 3): "1a368928422826e1c7e5de6b071b281684e0854e63ba0e68490c29951511b4bf",
    ("shared.w_gate_up", None): "0150d54db86a084a46fdff05785475af8a0da665689590d85a8d2c89bc1a0339",
    ("shared.w_down", None): "5c1dba23eb4cc12ad9cf82929f958854f61dad0ee365b04edd48a8f1dc69cfb2",
}


def test_version_1_with_experts():
    store = open_store(V1.with_name("v1-experts"))
    assert store.manifest["format_version"] == 1 and store.verify() == []
    assert (store.model["num_experts"], store.model["experts_per_token"]) == (4, 2)
    assert store.tensors["layers.0.experts.w_down.qweight"].shape == (4, 1, 1, 4, 32, 16)
    found = {
        key: fp32_sum(store.linear(f"layers.0.{key[0]}", expert=key[1]).dequantize()) for key in EXPERT_SUMS
    }
    assert found == EXPERT_SUMS


V2_SUMS = {
    ("v2-minima", "w_qkv"): "771589791bd8d4a53bbaf25aad9c59c87fecf5ea79b2e3bff69f67c7353a9008",
    ("v2-minima", "w_o"): "1ba647537a62e603ae9a1cc3c841ce0520fff1192fa950c1cf35ad4119d15df4",
    ("v2-minima", "w_gate_up"): "9b5ae524428d6153c40bbc034b446d5aa6d44d23f30bd1ca9e7fcd9b4e4d7c93",
    ("v2-minima", "w_down"): "c12a0e718f73c74d97caa1954af47244ad64f516457362db2971183f9bbb38fa",
    ("v2-order", "w_qkv"): "82ef9465a7f33a2afadfdf3dae2d8f22adb557165f0869089411e3c58cc65337",
    ("v2-order", "w_o"): "94f06f38a23c862d7043baabb4bd2b9ce3d4011f39c0346cea1eeead2fbcb7b9",
    ("v2-order", "w_gate_up"): "aaa2a6b6db607f62bd4d5a76635eac7ea1719c30a6ee9f7173a0769a0a6b75fd",
    ("v2-order", "w_down"): "5c58208b531f05475a7ec0d69695c7c530abffb6521140d9e8a73b8b523437d5",
}


def test_version_2():
    """Minima in place of zeros, and inputs in another order."""
    stores = {name: open_store(V1.with_name(name)) for name in ("v2-minima", "v2-order")}
    found = {key: fp32_sum(stores[key[0]].linear(f"layers.0.{key[1]}").dequantize()) for key in V2_SUMS}
    assert found == V2_SUMS
    for name, kinds in (("v2-minima", {"mins"}), ("v2-order", {"zeros", "order"})):
        store = stores[name]
        assert store.manifest["format_version"] == 2 and store.verify() == []
        assert {t.rpartition(".")[2] for t in store.tensors} >= kinds | {"qweight", "scales"}


V3_SUMS = {
    "tok_embeddings": "206a409ab3797d30a969112af4cb7990349e16d110ae1ab8b3c589039ad14ea1",
    "layers.0.w_qkv": "a6fab0ad752d853908f39acbb6a7c28d06a5a8d6b83a84e8605a3ddc68c7816a",
    "layers.0.w_o": "745833b5e43be2b93c3ac8656aa1430a88d517c5bffc16d5e6775ba2d1746fb8",
    "layers.0.w_gate_up": "eda0174a2737b970bff44c469211b1676fec21f679657f082f56d91cafae6f5e",
    "layers.0.w_down": "ba7dfd7cd5ba3523077da9afaad7e7eb9cc263347b48677dfa8da39d25b53e7e",
}


def test_version_3():
    """Codes of 8 bits, the embedding's too."""
    store = open_store(V1.with_name("v3"))
    assert store.manifest["format_version"] == 3 and store.verify() == []
    assert {name: fp32_sum(store.linear(name).dequantize()) for name in V3_SUMS} == V3_SUMS
    assert {t.layout for t in store.tensors.values()} == {"w8.n64k64", "group.n64", "vector"}
