from pathlib import Path

import pytest
from tiny_models import make_model


@pytest.fixture
def tiny(tmp_path) -> Path:
    return make_model(tmp_path / "tiny")


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "calib.txt"
    path.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(6000)), encoding="utf-8")
    return path
