// Every kernel's launcher, as plain C++: host code needs no CUDA compiler. Pointers are device pointers,
// `type` is the activation type T (float32, float16 or bfloat16), work is queued on `stream`, and a launch
// that fails throws CudaError. A row count of 0 launches nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "core/kv_scheme.h"
#include "engine/batch.h"
#include "kernels/cuda/fused_plan.h"

namespace turbomill::cuda {

// One sequence's part of a step. Its tokens are rows [first_row, first_row + length) of the activations, its
// cache blocks start at blocks[block_offset].
struct SliceInfo {
    int context, length, first_row, block_offset;
};

// Consecutive query rows of one slice, the same for each KV head, and the keys they attend to. Row r is query
// token r / group, query head head * group + r % group. When the keys are cut into parts, each part is a
// tile; its results meet in the slots [first_slot, first_slot + parts) of the workspace.
struct QueryTile {
    int slice, first;
    int begin, end;
    int first_slot, part, parts;
};
constexpr int kQueryRows = 16;   // of a tile: decodes, and everything in attention_any
constexpr int kPromptRows = 64;  // of a prompt's tile in attention_tensor
// Tokens of a prompt's tile in attention_prompt, whose rows are these by the query heads of a KV head.
constexpr int prompt_tile_tokens(int group) {
    return 128 / group;
}

// How a layer turns products of queries and keys into scores, and which keys a query sees.
struct Scores {
    float scale;    // of q . k
    float softcap;  // scores s become softcap * tanh(s / softcap); 0: they do not
    int window;     // keys that a query sees, itself included
};
constexpr int kNoWindow = 1 << 30;

struct SampleInfo {
    uint64_t seed, position;
    float temperature, top_p;
    int top_k, slot;
    float gap;     // min_p_gap(); -inf: off
    int logprobs;  // likeliest tokens to report; -1: nothing
};

// The edits of one row of logits, as in LogitEdits: ranges of EditsView's arrays.
struct EditRow {
    int row, slot;
    int first_edit, edit_count, first_ban, ban_count;
    int mask;  // which of the masks; -1: every token is allowed
    int last_unknown;
    float repetition, presence, frequency;
};
struct EditsView {
    int count;  // rows
    const EditRow* rows;
    const LogitEdit* edits;
    const AfterLast* bans;
    const uint32_t* masks;  // [masks, ceil(V / 32)]
};

// Logprobs of a row, as the host reads them.
struct LogprobRow {
    float logprob;
    int count;
    int ids[kMostLogprobs];
    float values[kMostLogprobs];
};
static_assert(sizeof(LogprobRow) == sizeof(Logprobs));

// One layer of the paged cache as kernels see it; kernels/cache_layout.h says what the offsets mean.
struct CacheView {
    uint8_t* data;  // of the layer in block 0
    int64_t block_bytes;
    int row_bytes[2], head_bytes[2], param_bytes;  // [K, V]
    int policy;                                    // EngineConfig::quant_policy of this layer
    KvFormat format[2];                            // what it says of [K, V]
    DType dtype;                                   // of plain rows: F32, F16, BF16
    int heads, head_dim, block_len;
    bool rotated;         // rows, queries and outputs are rotated (hadamard.cuh)
    const float* centre;  // [Nkv, D] in fp32, subtracted from keys that are rotated; or null

    bool quantized() const { return policy != 0; }
};

// A packed weight on the device, in the store's layout: (code - zero) * scale.
struct PackedView {
    const uint8_t* codes;  // [N/64, k_tiles, 512 * bits]
    const void* scales;    // [N/64, groups, 64], pair order
    const void* zeros;     // as scales; null: half of 2^bits
    bool bf16_params;      // type of scales and what is like them: bfloat16, else float16
    int n, k;              // logical
    int k_tiles, groups, group;
};
struct W4View : PackedView {};
struct W8View : PackedView {
    const void* mins;  // as scales, in place of zeros: code * scale + min; or null
};

// While one lives, the kernels that its thread launches start when those before them have ended
// (overlap.cuh).
class NoOverlap {
  public:
    NoOverlap();
    ~NoOverlap();
    NoOverlap(const NoOverlap&) = delete;
    NoOverlap& operator=(const NoOverlap&) = delete;
};

// Whether this build holds machine code for the current GPU.
bool kernels_fit_device();

// dst[i] = src[i] in another type
void convert(DType from, const void* src, DType to, void* dst, int64_t n, cudaStream_t stream);

// x [T, H] fp32 = table[id] * scale; an id below 0 means: the last sample of slot -1 - id
void embed(DType type, const void* table, const int* ids, const int* last_token, float scale, float* x,
           int rows, int h, cudaStream_t stream);

struct NormArgs {
    float* x;             // [*, H], the residual; null: zeros
    const void* delta;    // [*, H] in T, added to x first; or null
    const int* rows;      // row i of y is x[rows[i]]; null: x[i]
    bool keep;            // x + delta is written back
    const float* weight;  // [H]
    void* y;              // [count, H] in T; may be delta
    int count, h;
    float eps;
};
void rms_norm(DType type, const NormArgs& args, cudaStream_t stream);

// out [rows, I] = silu(gate) * up; gate_up [rows, 2 I] interleaves blocks of 8
void silu_gate(DType type, const void* gate_up, void* out, int rows, int inter, cudaStream_t stream);
// out [rows, I] = gelu_tanh(gate) * up, likewise
void gelu_gate(DType type, const void* gate_up, void* out, int rows, int inter, cudaStream_t stream);
// x [count] = cap * tanh(x / cap); what is not finite stays so, to be found by the sampler
void softcap(float* x, int64_t count, float cap, cudaStream_t stream);
// y [rows, N] += bias [N]
void add_bias(DType type, void* y, const float* bias, int rows, int n, cudaStream_t stream);

struct RopeArgs {
    void* qkv;               // [T, (Nq + 2 Nkv) D] in T; Q and K are rotated, Q is written back
    const float *cos, *sin;  // [session_len, half]
    int half;
    const int *positions, *row_slice;  // [T]; a row of slice -1 is not cached
    const SliceInfo* slices;
    const int* blocks;
    int tokens, num_heads;
    const float *q_norm,
        *k_norm;  // [D]: each head is first divided by its norm and multiplied by these; null
    float norm_eps;
};
// Normalises if asked to, rotates by position, then as the cache wants it, and writes K and V to the cache.
void rope_and_cache(DType type, const RopeArgs& args, const CacheView& cache, cudaStream_t stream);

// sums [Nkv, D] += keys of qkv [T, (Nq + 2 Nkv) D], normalised if asked to, not rotated
void add_keys(DType type, const RopeArgs& args, const CacheView& cache, float* sums, cudaStream_t stream);
// Heads of out [T, Nq, D] by the cache's rotation, in place.
void rotate_outputs(DType type, void* out, int tokens, int num_heads, int head_dim, cudaStream_t stream);

struct AttentionArgs {
    const void* qkv;  // [T, (Nq + 2 Nkv) D] in T
    void* out;        // [T, Nq D] in T
    const SliceInfo* slices;
    const int* blocks;
    const QueryTile* tiles;
    int tile_count, num_heads;
    Scores scores;
};
// Works for every type and head size: fp32 arithmetic on the ordinary cores.
void attention_any(DType type, const AttentionArgs& args, const CacheView& cache, cudaStream_t stream);

// Where the parts of a tile meet: kv heads * slots of 16 * (D + 2) floats, and a counter each, zero before
// and after.
struct AttentionParts {
    float* data;
    unsigned* counters;
};
// A slice of at most kQueryRows query rows as attention_decode takes it.
struct DecodeEntry {
    int first_unit;  // units of kDecodeUnit keys of the entries before it
    int context, length, first_row, block_offset;
    int first_key;  // where its units begin, a multiple of kDecodeUnit: no query sees the keys before
};
// What one of its blocks does: units [begin, end) of the line of all units, head by head, entry by entry.
struct alignas(16) DecodeRange {
    int begin, end;
    int head, entry;           // where it begins
    int pair_begin, pair_end;  // units of that head and entry
    // Every block has `share` units; or 0, and the range lies in one pair, whose `parts` blocks begin at
    // `first_block`.
    int share, first_block, parts;
    DecodeEntry first;  // that entry
};
constexpr int kDecodeUnit = 64;
constexpr int kMostDecodeRanges = 4;   // for each multiprocessor
constexpr int kMostDecodeParts = 128;  // of an entry and head, about: their sums meet in shared memory

// Blocks that a multiprocessor holds, for slices of at most `rows` query rows: as many as registers and
// shared memory allow with the rings that were measured to be best.
constexpr int decode_blocks(int policy, int rows, int head_dim) {
    if (head_dim > 128) return policy && rows <= 8 ? 2 : 1;
    const int blocks = policy == 4 ? 4 : 3;
    return rows <= 8 ? blocks : (blocks + 1) / 2;
}

struct DecodeArgs {
    const void* qkv;             // [T, (Nq + 2 Nkv) D] in T
    void* out;                   // [T, Nq D] in T
    const DecodeRange* ranges;   // [range_count]: one for each block
    const DecodeEntry* entries;  // [count + 1]: the last holds the number of all units
    const int* blocks;
    int range_count, count, most_rows, num_heads;  // most_rows: query rows of the longest slice
    // [session_len, D/2], when every slice is one token that rope_and_cache was not run for: attention_decode
    // then does its work for them, unless there is a window or a cap. Null otherwise.
    const float *cos, *sin;
    Scores scores;
    bool rotate_outputs;  // back, of a cache that is rotated: where attention_decode_rotates
};
// Whether attention_decode can rotate new tokens and outputs of such a cache, if it is rotated.
bool attention_decode_rotates(const CacheView& cache);
// Whether attention_decode has kernels for these.
bool attention_decode_fits(DType type, const CacheView& cache);
// Its workspace has two slots and a counter for each range.
void attention_decode(DType type, const DecodeArgs& args, const AttentionParts& parts, const CacheView& cache,
                      cudaStream_t stream);

// Whether attention_tensor has kernels for these.
bool attention_tensor_fits(DType type, const CacheView& cache);
// On the tensor cores. `tile_rows`: kQueryRows or kPromptRows (whose tiles have one part).
void attention_tensor(DType type, const AttentionArgs& args, const AttentionParts& parts, int tile_rows,
                      const CacheView& cache, cudaStream_t stream);

// Whether attention_prompt has kernels for these.
bool attention_prompt_fits(DType type, const CacheView& cache, int num_heads);
// Prompts on Hopper. `args.tiles` of prompt_tile_tokens, longest first; `tokens`: rows of qkv. An `unpacked`
// cache holds each slice's keys and values from block first_slot of its tiles on.
void attention_prompt(DType type, const AttentionArgs& args, const CacheView& cache, bool unpacked,
                      int tokens, int multiprocessors, cudaStream_t stream);

constexpr int kUnpackedBlock = 128;  // tokens of a block of the workspace below
struct UnpackArgs {
    const SliceInfo* slices;
    const int* blocks;
    const QueryTile* tiles;  // of attention_prompt: all of their slices', each unpacks its part of the keys
    int tile_count, window;
    CacheView workspace;  // of one layer, in T
};
// The keys and values that these slices' queries see in a quantized cache, as T.
void kv_unpack(DType type, const UnpackArgs& args, const CacheView& cache, cudaStream_t stream);

// Rows that w4_few_rows takes at once.
constexpr int kFewRows = 32;
// Partial sums that its workspace must hold for a weight: splits * rows * N floats, and one
// counter a tile of N, zero before and after.
struct W4Workspace {
    float* partial;
    size_t partial_floats;
    unsigned* counters;
    int counter_count;
    int multiprocessors;
};
// y [rows, N] = x [rows, K] w^T + bias, rows <= kFewRows, T 16-bit; y in T, or fp32 when `out` is F32
void w4_few_rows(DType type, DType out, const W4View& w, const void* x, const float* bias, void* y, int rows,
                 const W4Workspace& workspace, cudaStream_t stream);
// dense [N, K] = the weight in T, rounded
void w4_dequantize(DType type, const W4View& w, void* dense, cudaStream_t stream);

// Whether the build has machine code for sm_90a and the current GPU runs it: w4_fused has no other.
bool w4_fused_runs();
// Whether w4_fused takes a weight of these, with activations of `type`.
bool w4_fused_fits(DType type, bool bf16_params, int k, int group, int groups);
// And these activations.
bool w4_fused_fits(DType type, const W4View& w, const void* x);
// y [rows, N] = x [rows, K] w^T + bias, weights rounded to T. `overlap`: weights may arrive before the kernel
// launched before this one is done (programmatic dependent launch). Throws std::invalid_argument for a plan
// that has no kernel. `gated`: y [rows, N/2] = silu(gate) * up, whose columns the product interleaves by
// eights.
void w4_fused(DType type, DType out, const W4View& w, const void* x, const float* bias, void* y, int rows,
              const FusedPlan& plan, int multiprocessors, bool overlap, cudaStream_t stream,
              bool gated = false);

// Likewise for a w8 weight. Minima are taken in groups of 32 or 64, by plans of more than 16 tokens: not with
// so few rows. Without `rows`: whether at any number of them.
bool w8_fused_fits(DType type, bool bf16_params, bool minima, int k, int group, int groups);
bool w8_fused_fits(DType type, const W8View& w, const void* x, int rows);
void w8_fused(DType type, DType out, const W8View& w, const void* x, const float* bias, void* y, int rows,
              const FusedPlan& plan, int multiprocessors, bool overlap, cudaStream_t stream,
              bool gated = false);

// Whether dense_fused takes a weight [N, K] of T with these activations.
bool dense_fused_fits(DType type, const void* w, int k, const void* x);
// y [rows, N] = x [rows, K] w^T + bias, T 16-bit, on Hopper alone; `out`, `overlap` and `gated` as
// w4_fused's. The weight is read once for each 64 rows.
void dense_fused(DType type, DType out, const void* w, int n, int k, const void* x, const float* bias,
                 void* y, int rows, int multiprocessors, bool overlap, cudaStream_t stream,
                 bool gated = false);

// Whether w8_rows takes this weight with these activations.
bool w8_rows_fits(const W8View& w, const void* x);
// y [rows, N] = x [rows, K] w^T + bias, T 16-bit; y in T, or fp32 when `out` is F32. The weight is read once
// for each 128 rows; up to 32 it is not rounded. `splits` of K: 0 chooses. `overlap`: as for w4_fused.
void w8_rows(DType type, DType out, const W8View& w, const void* x, const float* bias, void* y, int rows,
             int splits, const W4Workspace& workspace, bool overlap, cudaStream_t stream);
// dense [rows, K] = rows of the weight from `first` on, a multiple of 64, in T, rounded
void w8_dequantize(DType type, const W8View& w, int first, int rows, void* dense, cudaStream_t stream);
// As embed(), of a table with codes: x [T, K] fp32, nothing rounded before the product.
void embed_w8(const W8View& w, const int* ids, const int* last_token, float factor, float* x, int rows,
              cudaStream_t stream);

// Writes to memory that nobody has: every call on the device's context fails from then on. For tests.
void illegal_access(cudaStream_t stream);

// What a block of the sampler found in its piece of a row.
struct SamplePart {
    unsigned long long greatest;  // the key of the greatest logit
    double race;                  // of the winner of a draw from all tokens; -1: none was run
    int winner;
    int finite;
};
// Parts that a row's sampling needs.
int sample_pieces(int vocab);
// One token for each row of logits [count, V]: tokens[i] is the token, or -1 when the row is not finite.
// Tokens also become their slot's last sample.
void sample(const float* logits, int vocab, const SampleInfo* info, int count, int* tokens, int* last_token,
            SamplePart* parts, cudaStream_t stream);
// Edits rows of logits [count, V] in place; `last_token` by slot.
void edit_logits(float* logits, int vocab, const EditsView& edits, const int* last_token,
                 cudaStream_t stream);
// out[i]: of token tokens[i] (-1: none) in row i of logits [rows, V], and of the row's likeliest tokens, as
// many as infos[i] wants, or `fixed_count` where `infos` is null. Rows that want none are left alone.
void logprobs(const float* logits, int vocab, const SampleInfo* infos, int fixed_count, const int* tokens,
              int rows, LogprobRow* out, cudaStream_t stream);

}  // namespace turbomill::cuda
