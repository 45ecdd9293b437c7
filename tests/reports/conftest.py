"""Tiny models, converted once."""

import pytest
from reports_models import make_model

# Long enough for eight windows of 128 bytes.
TEXT = "\n".join(f"{i}: the quick brown fox jumps over {i * i} lazy dogs." for i in range(60))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_rtn(tiny, tmp_path_factory):
    """The same, quantized by `turbomill lite`, which records where it came from."""
    from turbomill.quant import QuantOptions, quantize

    path = tmp_path_factory.mktemp("rtn") / "model"
    quantize(tiny, path, "rtn", QuantOptions(group=64))
    return path


@pytest.fixture(scope="session")
def tiny_store(tiny, tmp_path_factory):
    from turbomill.convert.store import convert_checkpoint

    return convert_checkpoint(tiny, tmp_path_factory.mktemp("stores") / "tiny")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory):
    """Stores and reference logits of the tests go nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURBOMILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
