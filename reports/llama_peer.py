"""llama.cpp's side of bench_cpu, run by an interpreter that has llama-cpp-python; it needs nothing of ours.

`PYTHON llama_peer.py MODEL.gguf THREADS SESSION SEQUENCES` answers each line of JSON on stdin, {"batch",
"prompt_tokens", "completion_tokens", "seed"}, by one on stdout: {"prefill_tok_s", "decode_tok_s"}.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from typing import Any


class Peer:
    """A context for `sequences` sequences of at most `session` tokens, greedy."""

    def __init__(self, lib: Any, model: str, threads: int, session: int, sequences: int) -> None:
        self.lib = lib
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise SystemExit(f"{model}: llama.cpp cannot load it")
        context = lib.llama_context_default_params()
        context.n_ctx = session * sequences
        context.n_batch = context.n_ubatch = 512
        context.n_seq_max = sequences
        context.n_threads = context.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, context)
        self.sampler = lib.llama_sampler_init_greedy()
        self.batch = lib.llama_batch_init(512, 0, 1)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")

    def run(self, batch: int, prompt_tokens: int, completion_tokens: int, seed: int) -> dict[str, float]:
        """Prompts one after the other, then all sequences together, a token a step."""
        lib, rng = self.lib, random.Random(seed)
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        prompts = [[rng.randrange(self.vocab) for _ in range(prompt_tokens)] for _ in range(batch)]
        start = time.perf_counter()
        last = []
        for sequence, prompt in enumerate(prompts):
            for first in range(0, prompt_tokens, 512):
                part = prompt[first : first + 512]
                self.decode(
                    [(t, first + i, sequence, first + i == prompt_tokens - 1) for i, t in enumerate(part)]
                )
            last.append(lib.llama_sampler_sample(self.sampler, self.context, -1))
        filled = time.perf_counter()
        for step in range(completion_tokens - 1):
            self.decode([(token, prompt_tokens + step, s, True) for s, token in enumerate(last)])
            last = [lib.llama_sampler_sample(self.sampler, self.context, s) for s in range(batch)]
        end = time.perf_counter()
        return {
            "prefill_tok_s": batch * prompt_tokens / (filled - start),
            "decode_tok_s": batch * (completion_tokens - 1) / (end - filled),
        }


def main() -> None:
    """The command."""
    import llama_cpp  # pyright: ignore[reportMissingImports]  # in the peer's environment alone

    quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model, (threads, session, sequences) = sys.argv[1], map(int, sys.argv[2:])
    peer = Peer(llama_cpp, model, threads, session, sequences)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
