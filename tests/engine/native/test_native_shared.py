"""Engines on one store share its memory: weights stay pages of the file."""

import re
from pathlib import Path

import pytest
from native_engine import Native, store_of, tiny_llama

SMAPS = Path("/proc/self/smaps")


def mappings(file: Path) -> list[dict[str, int]]:
    """Of each place where `file` is mapped: sizes in KiB by what smaps calls them."""
    found: list[dict[str, int]] = []
    ours = False
    for line in SMAPS.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(file))
            if ours:
                found.append({})
        elif ours and line.endswith("kB"):
            name, size, _ = line.split()
            found[-1][name.rstrip(":")] = int(size)
    return found


@pytest.mark.skipif(not SMAPS.is_file(), reason="needs Linux's smaps")
def test_two_engines_on_one_store_have_its_pages_in_common(tmp_path):
    tiny_llama(tmp_path / "model", hidden_size=256, intermediate_size=2048, num_hidden_layers=4)
    store = store_of(tmp_path / "model")
    (file,) = store.path.glob("*.safetensors")
    ids = [5, 6, 7, 8]
    with Native(store) as one, Native(store) as other:
        assert one.generate(ids, 8) == other.generate(ids, 8)
        maps = mappings(file)
        read = sum(found["Rss"] for found in maps)
        # Each has read all of it but some embeddings, and neither has a copy.
        assert len(maps) >= 2 and read > 1.5 * file.stat().st_size / 1024
        assert sum(found["Private_Dirty"] + found["Anonymous"] for found in maps) == 0
