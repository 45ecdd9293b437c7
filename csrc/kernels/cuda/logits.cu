// Around the sampler: what requests do to their rows of logits before it (kernels/logit_edits.cc, rounding
// for rounding), and the log probabilities they are told after it (logprobs_of in kernels/sampling.cc).
#include <cmath>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/token_keys.cuh"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

__device__ void apply(float& logit, const EditRow& rules, const LogitEdit& edit) {
    if (!isfinite(logit)) return;
    float x = logit;
    if (edit.seen) x = x > 0.f ? __fdiv_rn(x, rules.repetition) : __fmul_rn(x, rules.repetition);
    if (edit.count > 0) {
        x = __fsub_rn(x, rules.presence);
        x = __fsub_rn(x, __fmul_rn(rules.frequency, float(edit.count)));
    }
    logit = edit.banned ? kBannedLogit : __fadd_rn(x, edit.bias);
}

// A block for each row that has edits.
__global__ void __launch_bounds__(kThreads)
    edit_kernel(float* all_logits, int vocab, EditsView edits, const int* last_token) {
    const EditRow rules = edits.rows[blockIdx.x];
    float* logits = all_logits + int64_t(rules.row) * vocab;
    const int last = last_token[rules.slot];
    bool counted = !rules.last_unknown;
    for (int i = threadIdx.x; i < rules.edit_count; i += kThreads) {
        LogitEdit edit = edits.edits[rules.first_edit + i];
        if (rules.last_unknown && edit.token == last) {
            ++edit.count;
            edit.seen = counted = true;
        }
        apply(logits[edit.token], rules, edit);
    }
    counted = __syncthreads_or(counted);
    if (!counted && threadIdx.x == 0) apply(logits[last], rules, {last, 1, 0.f, true, false});
    __syncthreads();
    for (int i = threadIdx.x; i < rules.ban_count; i += kThreads) {
        const AfterLast ban = edits.bans[rules.first_ban + i];
        if (ban.last == last && isfinite(logits[ban.token])) logits[ban.token] = kBannedLogit;
    }
    if (rules.mask < 0) return;
    __syncthreads();
    const uint32_t* allowed = edits.masks + int64_t(rules.mask) * ((vocab + 31) / 32);
    for (int i = threadIdx.x; i < vocab; i += kThreads)
        if (!(allowed[i / 32] >> (i % 32) & 1u) && isfinite(logits[i])) logits[i] = kDisallowedLogit;
}

template <class T, class Join>
__device__ T block_reduce(T v, T* shared, const Join& join) {
    for (int mask = 16; mask; mask /= 2) v = join(v, __shfl_xor_sync(kFullWarp, v, mask));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = shared[0];
    for (int i = 1; i < kWarps; ++i) v = join(v, shared[i]);
    return v;
}

// The greatest key below `bound`.
__device__ uint64_t greatest_below(const float* logits, int vocab, uint64_t bound, uint64_t* shared) {
    uint64_t greatest = 0;
    for (int id = threadIdx.x; id < vocab; id += kThreads) {
        const uint64_t key = key_of(logits[id], id);
        if (key < bound && key > greatest) greatest = key;
    }
    return block_reduce(greatest, shared, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

// A block for each row.
__global__ void __launch_bounds__(kThreads)
    logprobs_kernel(const float* all_logits, int vocab, const SampleInfo* infos, int fixed_count,
                    const int* tokens, LogprobRow* out) {
    __shared__ uint64_t keys[kWarps];
    __shared__ double sums[kWarps];
    const int row = blockIdx.x;
    int count = infos ? infos[row].logprobs : fixed_count;
    if (count < 0) return;
    count = min(count, vocab);
    const float* logits = all_logits + int64_t(row) * vocab;
    LogprobRow& result = out[row];
    uint64_t key = greatest_below(logits, vocab, ~uint64_t(0), keys);
    const float best = logits[id_of(key)];
    double sum = 0;
    for (int id = threadIdx.x; id < vocab; id += kThreads) sum += exp(double(logits[id] - best));
    sum = block_reduce(sum, sums, [](double a, double b) { return a + b; });
    const double log_sum = double(best) + log(sum);
    const int token = tokens[row];
    if (threadIdx.x == 0) {
        result.logprob = token >= 0 ? float(double(logits[token]) - log_sum) : 0.f;
        result.count = count;
    }
    for (int i = 0; i < count; ++i) {
        if (threadIdx.x == 0) {
            result.ids[i] = id_of(key);
            result.values[i] = float(double(logits[id_of(key)]) - log_sum);
        }
        if (i + 1 < count) key = greatest_below(logits, vocab, key, keys);
    }
}

}  // namespace

void edit_logits(float* logits, int vocab, const EditsView& edits, const int* last_token,
                 cudaStream_t stream) {
    if (edits.count == 0) return;
    edit_kernel<<<edits.count, kThreads, 0, stream>>>(logits, vocab, edits, last_token);
    check_launch("edit_logits");
}

void logprobs(const float* logits, int vocab, const SampleInfo* infos, int fixed_count, const int* tokens,
              int rows, LogprobRow* out, cudaStream_t stream) {
    if (rows == 0) return;
    logprobs_kernel<<<rows, kThreads, 0, stream>>>(logits, vocab, infos, fixed_count, tokens, out);
    check_launch("logprobs");
}

}  // namespace turbomill::cuda
