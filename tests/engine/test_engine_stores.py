"""MODEL as a store: opened, or converted once into the cache."""

import json

import pytest

from turbomill.engine.stores import cache_dir, open_model
from turbomill.errors import CheckpointError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stores(cache):
    return sorted(path for path in (cache / "stores").iterdir() if path.is_dir())


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TURBOMILL_CACHE", "/own")
    assert str(cache_dir()) == "/own"
    monkeypatch.delenv("TURBOMILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_dir()) == "/xdg/turbomill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "turbomill"


def test_a_store_is_opened_where_it_is(tiny_store, cache):
    assert open_model(tiny_store.path).path == tiny_store.path
    assert not cache.exists()


def test_a_checkpoint_is_converted_once(tiny_checkpoint, tiny_store, cache):
    first = open_model(tiny_checkpoint)
    assert first.path.parent == cache / "stores" and first.fingerprint == tiny_store.fingerprint
    written = (first.path / "store.json").stat().st_mtime_ns
    assert open_model(str(tiny_checkpoint)).path == first.path
    assert (first.path / "store.json").stat().st_mtime_ns == written and len(stores(cache)) == 1


def test_a_changed_checkpoint_is_converted_again(tiny_checkpoint, tmp_path, cache):
    import shutil

    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    first = open_model(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300}))
    second = open_model(copy)
    assert second.path != first.path and second.context_length == 300


def test_a_failed_conversion_leaves_no_store(tiny_checkpoint, tmp_path, cache):
    import shutil

    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CheckpointError):
        open_model(copy)
    assert stores(cache) == []


def test_no_such_model(cache):
    with pytest.raises(CheckpointError, match="/no/such"):
        open_model("/no/such")
