// What a device must do for the engine. The decoder is written once over this interface; `cpu` and `cuda`
// implement it. Activations are opaque device buffers whose element type the backend chooses.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/config.h"
#include "engine/batch.h"
#include "store/weights.h"

namespace turbomill {

// Device memory for activations, [rows, columns] in the backend's activation type.
class Buffer {
  public:
    virtual ~Buffer() = default;
    virtual void* data() = 0;
};

class Backend {
  public:
    virtual ~Backend() = default;

    virtual std::unique_ptr<Buffer> allocate(int rows, int columns) = 0;
    // For the residual, the `x` of the calls below, to which every layer adds: a backend whose activations
    // are narrow may keep it wider.
    virtual std::unique_ptr<Buffer> allocate_residual(int rows, int columns) {
        return allocate(rows, columns);
    }

    // The embedding table [V, H], set once before the first step; it outlives the backend's use of it.
    virtual void set_embedding(const Linear& table) = 0;

    // Makes a step's tokens, positions and block tables current for the calls below.
    virtual void begin_step(const BatchData& batch) = 0;
    // Queues copies of whole blocks of the cache, in order, before anything that the step writes.
    virtual void copy_blocks(const std::vector<BlockCopy>& copies) = 0;
    // Gives the cache's memory back (level 1), and what weights it holds that the store has too (level 2). No
    // step runs until wake(), which may throw; the cache's bytes are then anything.
    virtual void sleep(int level) = 0;
    virtual void wake() = 0;
    // Issues the step that was begun, of which `calls` makes all calls below: a backend may record what they
    // queue and repeat it for later steps without calling. The batch stays where it is until synchronize().
    // Up to two steps may be issued at a time.
    virtual void run(BatchData& /*batch*/, const std::function<void()>& calls) { calls(); }
    // Whether the oldest step that is issued is done.
    virtual bool ready() { return true; }
    // Waits until it is; only then are its batch's results there.
    virtual void synchronize() = 0;

    // x [T, H], a residual, = embedding rows of the step's tokens, times embedding_scale; decode tokens come
    // from the slots' last samples.
    virtual void embed(Buffer& x) = 0;
    // y [T, H] = rms_norm(x) * weight; x and y may be one buffer
    virtual void rms_norm(Buffer& x, const std::vector<float>& weight, Buffer& y) = 0;
    // x += delta, then y = rms_norm(x) * weight, all [T, H]
    virtual void add_rms_norm(Buffer& delta, Buffer& x, const std::vector<float>& weight, Buffer& y) = 0;
    // y [T, N] = x [T, K] w^T + bias
    virtual void linear(const Linear& w, Buffer& x, Buffer& y) = 0;
    // Between these two, rope_and_cache also adds the keys up, before their rotation by position; afterwards
    // each layer whose rows are stored rotated has a *centre*: the mean key, as it is on average over the
    // positions of a session. From then on it is subtracted from the layer's keys before they are stored.
    // That moves all scores of a query alike, which the softmax does not see, and leaves less to be rounded.
    virtual void begin_centring() = 0;
    virtual void end_centring() = 0;
    // Rotates the first D_rot dimensions of each head of Q and K of qkv [T, (Nq + 2 Nkv) D] in place and
    // writes K and V of `layer` to the paged cache.
    virtual void rope_and_cache(int layer, Buffer& qkv) = 0;
    // out [T, Nq D] = causal attention of the step's queries over each sequence's cached context, under the
    // layer's window and attention_softcap
    virtual void attention(int layer, Buffer& qkv, Buffer& out) = 0;
    // out [T, I] = silu(gate) * up; gate_up [T, 2 I] interleaved by 8
    virtual void silu_gate(Buffer& gate_up, Buffer& out) = 0;

    // The linear of a gate and what follows it: out [T, I] = silu(gate) * up of gate_up = x w^T. A backend
    // that does both at once leaves gate_up [T, 2 I] alone.
    virtual void silu_gated_linear(const Linear& w, Buffer& x, Buffer& gate_up, Buffer& out) {
        linear(w, x, gate_up);
        silu_gate(gate_up, out);
    }

    // What only some models need (ModelConfig's variants). A backend overrides what it supports, and refuses
    // the other variants when it is made: see require_known_variants.

    // Replaces each query head of qkv [T, (Nq + 2 Nkv) D] by rms_norm(head) * q [D], each key head likewise.
    virtual void qk_norm(const std::vector<float>& /*q*/, const std::vector<float>& /*k*/, Buffer& /*qkv*/) {
        unsupported("qk_norm");
    }
    // out [T, I] = gelu_tanh(gate) * up; gate_up [T, 2 I] interleaved by 8
    virtual void gelu_gate(Buffer& /*gate_up*/, Buffer& /*out*/) { unsupported("activation gelu_tanh"); }
    // y [T, H] = sum over each row's top experts of probability * expert(x) (+ the shared expert); x, y
    // differ
    virtual void moe(const Moe& /*moe*/, Buffer& /*x*/, Buffer& /*y*/) { unsupported("num_experts"); }

    // Final norm of x + delta, logits (with logit_softcap), sampling. Fills batch.samples and batch.logits.
    virtual void finish(Buffer& delta, Buffer& x, const std::vector<float>& norm, const Linear& head,
                        BatchData& batch) = 0;

  private:
    [[noreturn]] static void unsupported(const std::string& what) {
        throw std::runtime_error("this backend does not support " + what);
    }
};

}  // namespace turbomill
