"""What a method does to each stage of a layer: data, so that methods combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """The steps, in this order. All of them but rounding need calibration."""

    name: str
    correct: bool = False  # make up for the drift of the inputs
    scale: bool = False  # AWQ: scale salient channels up, folding the scale into what comes before
    ranges: Literal["minmax", "clip", "search"] = "minmax"  # of groups: AWQ's clipping, or E[x^2]-weighted
    solve: bool = False  # GPTQ's rounding loop, else to nearest
    refine: int = 0  # passes of least-squares scales and coordinate descent over the codes
    calibrated: bool = True


RECIPES = {
    "rtn": Recipe("rtn", calibrated=False),
    "awq": Recipe("awq", scale=True, ranges="clip"),
    "gptq": Recipe("gptq", ranges="search", solve=True),
}
