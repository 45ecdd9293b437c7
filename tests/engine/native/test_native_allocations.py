"""A steady state of decodes allocates nothing on the engine's threads: every allocation is counted.

Run as a program, with count_malloc.c preloaded, this file prints what each thread allocated:

    LD_PRELOAD=count.so python test_native_allocations.py count.so model.json '{"quant_policy": 8}'
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

THREADS = ("tm-engine", "tm-executor", "tm-worker")
STEPS = 64  # blocks of 16 tokens are filled, recorded, and asked for on the way


def decode(counter: str, model: str, fields: str) -> None:
    """Two rounds of requests until nothing is new, then a third: allocations within STEPS of its steps."""
    import scipy_openblas64
    from stress import Clients

    from turbomill import _core

    class Counted(Clients):
        counts: dict[str, list[int]]
        watched: tuple[int, ...] = ()

        def on_outputs(self, outputs: list[Any]) -> None:
            super().on_outputs(outputs)
            least = min((len(self.tokens.get(number, ())) for number in self.watched), default=0)
            for at, length in (("begin", 8), ("end", 8 + STEPS)):
                if least >= length and at not in self.counts:
                    self.counts[at] = [library.allocations(name.encode()) for name in THREADS]

    _core.load_blas(str(Path(scipy_openblas64.get_lib_dir()) / scipy_openblas64.get_library(fullname=True)))
    library = ctypes.CDLL(counter)
    library.allocations.restype = ctypes.c_long
    found = json.loads(Path(model).read_text())
    clients = Counted(
        _core,
        found["model"],
        found["tensors"],
        cache_block_count=64,
        block_len=16,
        max_batch_size=64,  # outputs have room for a client, this one, that falls behind by the whole test
        session_len=256,
        num_threads=2,
        **json.loads(fields),
    )
    clients.counts = {}
    rules: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20}]
    for batch in range(3):
        work = [
            {
                "token_ids": [3 + (7 * batch + i) % 200] * 20,
                "max_new_tokens": 90,
                "seed": i,
                **rules[i % len(rules)],
            }
            for i in range(6)
        ]
        with clients.arrived:
            numbers = tuple(clients.submit(request) for request in work)
            clients.watched = numbers if batch == 2 else ()
        for number in numbers:
            clients.wait(number)
    clients.engine.close()
    sys.stdout.write(json.dumps(clients.counts) + "\n")


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None or not compiler:
        pytest.skip("counting allocations takes glibc and a C compiler")
    library = tmp_path_factory.mktemp("counter") / "count_malloc.so"
    source = Path(__file__).with_name("count_malloc.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", source, "-o", library], check=True)
    return library


@pytest.mark.parametrize(
    ("bits", "fields"),
    [
        (16, {"cache_dtype": "float16"}),
        (16, {"quant_policy": 8, "deterministic": True}),
        (4, {"activation_bits": 32}),
        (4, {"activation_bits": 16, "quant_policy": 4, "kv_rotation": True}),
    ],
    ids=str,
)
def test_a_steady_state_allocates_nothing(bits: int, fields: Any, counter: Path, tmp_path: Path) -> None:
    import torch
    from native_engine import store_of, tiny_llama
    from quantized_models import quantized
    from stress import description

    from turbomill import _core
    from turbomill.convert.formats.awq import AwqFormat
    from turbomill.convert.linear import QuantScheme

    if fields.get("activation_bits") == 16 and not _core.cpu_features()["int8"]:
        pytest.skip("this CPU has no AVX-512 VNNI")
    tiny_llama(tmp_path / "dense", torch.float16, hidden_size=128, intermediate_size=256)
    path = tmp_path / "dense"
    if bits == 4:
        path = quantized(path, AwqFormat(QuantScheme(4, 64, False)), torch.float16)
    (tmp_path / "model.json").write_text(json.dumps(description(store_of(path))))
    done = subprocess.run(
        [sys.executable, __file__, counter, tmp_path / "model.json", json.dumps(fields)],
        env=os.environ | {"LD_PRELOAD": str(counter)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    before, after = (dict(zip(THREADS, counts[at], strict=True)) for at in ("begin", "end"))
    assert before["tm-engine"] > 0, "the engine's first steps were not counted"
    assert {name: after[name] - before[name] for name in THREADS} == dict.fromkeys(THREADS, 0)


if __name__ == "__main__":
    decode(*sys.argv[1:])
