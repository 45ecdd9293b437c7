"""Baichuan 7B and Baichuan2 7B: q, k and v in one linear; Baichuan2 normalises the rows of its head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from turbomill.convert.models import llama
from turbomill.convert.models.base import Fusion, HfConfig, RunsAs, ScaleGroup, register
from turbomill.convert.models.llama import LLAMA
from turbomill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor


def _shapes(config: HfConfig) -> dict[str, tuple[int, int]]:
    hidden = int(config["hidden_size"])
    rest = {name: shape for name, shape in llama.linear_shapes(config).items() if name not in llama.ATTENTION}
    return {"self_attn.W_pack": (hidden, 3 * hidden), **rest}


def _biases(config: HfConfig) -> dict[str, bool]:
    return dict.fromkeys(_shapes(config), False)


def _scale_groups(config: HfConfig) -> tuple[ScaleGroup, ...]:
    attention = ScaleGroup("input_layernorm", ("self_attn.W_pack",), "self_attn")
    return (attention, *llama.scale_groups(config)[2:])


def _unit_rows(head: Tensor) -> Tensor:
    """What Baichuan2's head multiplies by: each row divided by its length."""
    import torch

    return torch.nn.functional.normalize(head.float()).to(head.dtype)


def _check(config: HfConfig) -> None:
    # The 13B models bias attention by distance instead of rotating, and so state no number of positions.
    if "max_position_embeddings" not in config or config.get("hidden_size") == 5120:
        raise UnsupportedModelError(
            "config.json: this is Baichuan 13B, whose ALiBi attention is not supported; "
            "supported: Baichuan 7B, Baichuan2 7B"
        )
    llama.check(config)


BAICHUAN = register(
    replace(
        LLAMA,
        name="BaiChuanForCausalLM",
        models="Baichuan 7B",
        remote_code=True,
        fusions=(Fusion("w_qkv", ("self_attn.W_pack",)), *LLAMA.fusions[1:]),
        linear_shapes=_shapes,
        linear_biases=_biases,
        scale_groups=_scale_groups,
        check=_check,
        runs_as=RunsAs(LLAMA, split={"self_attn.W_pack": llama.ATTENTION}),
    )
)

BAICHUAN2 = register(
    replace(BAICHUAN, name="BaichuanForCausalLM", models="Baichuan2 7B", head_transform=_unit_rows)
)
