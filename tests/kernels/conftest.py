"""Every kernel runs on every instruction set this CPU has, against fp64 references."""

from __future__ import annotations

from pathlib import Path

import pytest
import scipy_openblas64

from turbomill import _core

_core.load_blas(str(Path(scipy_openblas64.get_lib_dir()) / scipy_openblas64.get_library(fullname=True)))


@pytest.fixture(params=_core.cpu_features()["available"])
def isa(request: pytest.FixtureRequest) -> str:
    return request.param
