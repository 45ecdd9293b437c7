"""What a method does to each stage of a layer: data, so that methods combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """The steps, in this order. All of them but rounding need calibration."""

    name: str
    correct: bool = False  # make up for the drift of the inputs
    scale: bool = False  # AWQ: scale salient channels up, folding the scale into what comes before
    ranges: Literal["clip", "search"] = "search"  # of groups: AWQ's clipping, or weighted by E[x^2]
    solve: bool = False  # GPTQ's rounding loop, else to nearest
    refine: int = 0  # passes of least-squares scales and coordinate descent over the codes


RECIPES = {
    "rtn": Recipe("rtn"),
    "awq": Recipe("awq", correct=True, scale=True, ranges="clip"),
    "gptq": Recipe("gptq", correct=True, ranges="search", solve=True),
    "auto": Recipe("auto", correct=True, ranges="search", solve=True, refine=1),
}


def recipe_of(method: str, correct: bool) -> Recipe:
    """The method's recipe, with or without the correction for drifted inputs."""
    recipe = RECIPES[method]
    return recipe if correct else replace(recipe, correct=False)
