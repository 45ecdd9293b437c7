"""Every kernel runs on every instruction set this CPU has, against fp64 references."""

from __future__ import annotations

import glob

import pytest
import scipy_openblas64

from turbomill import _core

_core.load_blas(glob.glob(f"{scipy_openblas64.get_lib_dir()}/libscipy_openblas64_*.so")[0])


@pytest.fixture(params=_core.cpu_features()["available"])
def isa(request: pytest.FixtureRequest) -> str:
    return request.param
