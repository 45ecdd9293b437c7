// Choosing a token from each row of logits: what kernels/sampling.cc does on the host, token for token. The
// blocks of a row each scan a piece of it; a block for each row then chooses among what they found, which
// settles greedy rows and draws from all tokens. For min-p, top-k and top-p it reads the row again, without a
// sort: a radix descent over keys that order tokens by (logit falling, id rising) finds the last key of the
// set, by count or by probability.
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/token_keys.cuh"
#include "kernels/cuda/types.cuh"

namespace turbomill::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;  // of a block that chooses
constexpr int kScanThreads = 512, kScanBlocks = 3;      // of one that scans; and on a multiprocessor
constexpr int kPiece = 16 * kScanThreads;               // tokens that it scans

__device__ inline uint64_t mix(uint64_t x) {  // splitmix64's finaliser, as in sampling.cc
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

struct Racer {
    double key;
    int id;
};

__device__ inline bool ahead(const Racer& a, const Racer& b) {
    return b.id < 0 || (a.id >= 0 && (a.key > b.key || (a.key == b.key && a.id < b.id)));
}

// What a block shares. Results of reductions are read by all threads after the barrier that ends them.
struct Shared {
    double mass[256];
    unsigned count[256];
    Racer racers[kWarps];
    double sums[kWarps];
    uint64_t prefix;
    double above;
    bool done;
};

// In reductions, a lane for what each warp found; of 16 warps two lanes, which changes nothing but sums.
static_assert(kWarps == 32 && kScanThreads % 32 == 0 && 32 % (kScanThreads / 32) == 0);

__device__ uint64_t warp_max(uint64_t v) {
    for (int mask = 16; mask; mask /= 2) {
        const uint64_t other = __shfl_xor_sync(kFullWarp, v, mask);
        v = other > v ? other : v;
    }
    return v;
}

__device__ double warp_sum(double v) {
    for (int mask = 16; mask; mask /= 2) v += __shfl_xor_sync(kFullWarp, v, mask);
    return v;
}

__device__ double block_sum(double v, Shared& s) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(s.sums[threadIdx.x % 32]);
}

// Adds this warp's tokens to the histogram. Logits crowd in few bins at the top digits, where a warp sums
// before it adds; what is left after two bins is spread out and adds by itself.
__device__ void tally(bool inside, unsigned bin, double weight, Shared& s) {
    for (int round = 0; round < 2; ++round) {
        const unsigned waiting = __ballot_sync(kFullWarp, inside);
        if (!waiting) return;
        const unsigned common = __shfl_sync(kFullWarp, bin, __ffs(waiting) - 1);
        const bool mine = inside && bin == common;
        const unsigned members = __ballot_sync(kFullWarp, mine);
        const double total = warp_sum(mine ? weight : 0.0);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&s.mass[common], total);
            atomicAdd(&s.count[common], unsigned(__popc(members)));
        }
        inside = inside && !mine;
    }
    if (inside) {
        atomicAdd(&s.mass[bin], weight);
        atomicAdd(&s.count[bin], 1u);
    }
}

// One warp: the first bin from the top at which mass above reaches `target`; the last non-empty one if
// rounding keeps the sum below it.
__device__ void choose_bin(double target, Shared& s) {
    const int lane = threadIdx.x;
    double own = 0;
    for (int i = 0; i < 8; ++i) own += s.mass[255 - 8 * lane - i];
    double before = own;  // inclusive scan over lanes, then exclusive
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(kFullWarp, before, step);
        if (lane >= step) before += other;
    }
    before -= own;
    int bin = -1, lowest = -1;
    double above = before, lowest_above = before;
    for (int i = 0; i < 8; ++i) {
        const int b = 255 - 8 * lane - i;
        if (!s.count[b]) continue;
        lowest = b;
        lowest_above = above;
        if (s.above + above + s.mass[b] >= target) {
            bin = b;
            break;
        }
        above += s.mass[b];
    }
    const unsigned found = __ballot_sync(kFullWarp, bin >= 0);
    const unsigned filled = __ballot_sync(kFullWarp, lowest >= 0);
    const int owner = found ? __ffs(found) - 1 : 31 - __clz(filled);
    __syncwarp();  // every lane has read what is written now
    if (lane != owner) return;
    const int chosen = found ? bin : lowest;
    const double passed = found ? above : lowest_above;
    // All of a bin belongs to the set when it holds one token, or just as much as is missing.
    s.done = s.count[chosen] == 1 || s.above + passed + s.mass[chosen] <= target;
    s.above += passed;
    s.prefix = s.prefix << 8 | unsigned(chosen);
}

// The last key of the smallest set of greatest keys whose weights reach `target`, among keys >= floor.
template <class Weight>
__device__ uint64_t descend(const float* logits, int vocab, uint64_t floor, double target, Weight&& weight,
                            Shared& s) {
    __syncthreads();
    if (threadIdx.x == 0) s.prefix = 0, s.above = 0, s.done = false;
    for (int shift = 56;; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += kThreads) s.mass[i] = 0, s.count[i] = 0;
        __syncthreads();
        const uint64_t prefix = s.prefix;
        for (int start = 0; start < vocab; start += kThreads) {
            const int id = start + int(threadIdx.x);
            const uint64_t key = id < vocab ? key_of(logits[id], id) : 0;
            const bool inside = id < vocab && key >= floor && (shift == 56 || key >> (shift + 8) == prefix);
            tally(inside, unsigned(key >> shift) & 255u, inside ? weight(logits[id]) : 0.0, s);
        }
        __syncthreads();
        if (threadIdx.x < 32) choose_bin(target, s);
        __syncthreads();
        if (s.done || shift == 0) {
            const uint64_t last = s.prefix << shift;
            return last > floor ? last : floor;
        }
    }
}

// The exponential race of sampling.cc: the token's key, or nothing when it cannot beat `bar`.
struct Race {
    uint64_t stream;
    double inverse;

    __device__ explicit Race(const SampleInfo& info)
        : stream(mix(mix(info.seed) ^ mix(info.position + 0x632be59bd9b4e019ull))),
          inverse(1.0 / double(info.temperature)) {}

    __device__ void enter(float logit, int id, Racer& best) const {
        const double v = double((mix(stream + uint64_t(id)) >> 11) + 1) * 0x1.0p-53;
        const double energy = double(logit) * inverse;
        if (best.id >= 0 && double(ilogb(v)) * 0.6931471805599453 > energy - best.key) return;
        const double limit = 1.0 - 0x1.0p-53;
        const Racer racer{energy - log(-log1p(-(v < limit ? v : limit))), id};
        if (ahead(racer, best)) best = racer;
    }
};

__device__ Racer warp_winner(Racer best) {
    for (int mask = 16; mask; mask /= 2) {
        const Racer other{__shfl_xor_sync(kFullWarp, best.key, mask),
                          __shfl_xor_sync(kFullWarp, best.id, mask)};
        if (ahead(other, best)) best = other;
    }
    return best;
}

// racers: one for each warp of the block.
__device__ Racer block_winner(Racer best, Racer* racers) {
    best = warp_winner(best);
    __syncthreads();
    if (threadIdx.x % 32 == 0) racers[threadIdx.x / 32] = best;
    __syncthreads();
    return warp_winner(racers[threadIdx.x % (blockDim.x / 32)]);
}

__device__ bool draws_from_all(const SampleInfo& info) {
    return info.temperature > 0.f && info.top_k <= 0 && info.top_p >= 1.f && info.gap == -INFINITY;
}

// What a row's tokens [begin, end) hold: the greatest key, the race's winner if it is run over all tokens,
// and whether all are finite.
// Fours: rows, and so pieces of them, lie at multiples of 16 bytes.
template <bool Fours>
__device__ SamplePart scan(const float* logits, int begin, int end, const SampleInfo& info) {
    constexpr int kScanWarps = kScanThreads / 32, kEach = kPiece / kScanThreads,
                  kStep = Fours ? 4 : 1;  // of a thread; one behind the other
    const auto id_at = [&](int i) {
        return begin + int(threadIdx.x) * kStep + i / kStep * kStep * kScanThreads + i % kStep;
    };
    float logit[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i += kStep) {
        if constexpr (Fours) {
            const float4 four = id_at(i) < end ? *reinterpret_cast<const float4*>(logits + id_at(i))
                                               : make_float4(0.f, 0.f, 0.f, 0.f);
            logit[i] = four.x, logit[i + 1] = four.y, logit[i + 2] = four.z, logit[i + 3] = four.w;
        } else {
            logit[i] = id_at(i) < end ? logits[id_at(i)] : 0.f;
        }
    }
    float top = -INFINITY;
    int at = -1;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {  // ids rise, so that the lowest of equals is kept
        finite &= bool(isfinite(logit[i]));
        if (id_at(i) < end && logit[i] > top) top = logit[i], at = id_at(i);
    }
    __shared__ uint64_t keys[kScanWarps];
    __shared__ Racer racers[kScanWarps];
    const uint64_t own = warp_max(at < 0 ? 0 : key_of(top, at));
    if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = own;
    finite = __syncthreads_and(finite);
    const uint64_t greatest = warp_max(keys[threadIdx.x % kScanWarps]);
    Racer winner{0, -1};
    if (finite && draws_from_all(info)) {
        const Race race(info);
        race.enter(logits[id_of(greatest)], id_of(greatest), winner);  // a high bar from the start
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (id_at(i) < end) race.enter(logit[i], id_at(i), winner);
        winner = block_winner(winner, racers);
    }
    return {greatest, winner.key, winner.id, finite};
}

// The same of the whole row, from its pieces, by one warp.
__device__ SamplePart join(const SamplePart* parts, int count) {
    SamplePart whole{0, 0, -1, true};
    const auto add = [&](const SamplePart& part) {
        whole.finite &= part.finite;
        whole.greatest = part.greatest > whole.greatest ? part.greatest : whole.greatest;
        if (part.winner >= 0 && ahead({part.race, part.winner}, {whole.race, whole.winner}))
            whole.race = part.race, whole.winner = part.winner;
    };
    for (int i = threadIdx.x; i < count; i += 32) add(parts[i]);
    for (int mask = 16; mask; mask /= 2)
        add({__shfl_xor_sync(kFullWarp, whole.greatest, mask), __shfl_xor_sync(kFullWarp, whole.race, mask),
             __shfl_xor_sync(kFullWarp, whole.winner, mask), __shfl_xor_sync(kFullWarp, whole.finite, mask)});
    return whole;
}

// A draw from the min-p, top-k and top-p set, by one block.
__device__ int draw_from_set(const float* logits, int vocab, int best, const SampleInfo& info, Shared& s) {
    uint64_t floor = 0;
    if (info.gap > -INFINITY) floor = key_of(logits[best] + info.gap, -1);  // the lowest key of that logit
    if (info.top_k > 0 && info.top_k < vocab)
        floor = descend(logits, vocab, floor, double(info.top_k), [](float) { return 1.0; }, s);
    if (info.top_p < 1.f) {
        const float top = logits[best];
        const double temperature = info.temperature;
        const auto weight = [&](float logit) { return exp(double(logit - top) / temperature); };
        double total = 0;
        for (int id = threadIdx.x; id < vocab; id += kThreads)
            if (key_of(logits[id], id) >= floor) total += weight(logits[id]);
        total = block_sum(total, s);
        floor = descend(logits, vocab, floor, double(info.top_p) * total, weight, s);
    }
    const Race race(info);
    Racer winner{0, -1};
    race.enter(logits[best], best, winner);
    for (int id = threadIdx.x; id < vocab; id += kThreads)
        if (key_of(logits[id], id) >= floor) race.enter(logits[id], id, winner);
    return block_winner(winner, s.racers).id;
}

// Grid: (pieces, rows).
__global__ void __launch_bounds__(kScanThreads, kScanBlocks)
    scan_kernel(const float* all_logits, int vocab, const SampleInfo* infos, SamplePart* parts) {
    allow_next();
    const float* logits = all_logits + int64_t(blockIdx.y) * vocab;
    const SampleInfo info = infos[blockIdx.y];
    wait_for_previous();
    const int begin = blockIdx.x * kPiece, end = min(vocab, begin + kPiece);
    const SamplePart part =
        vocab % 4 ? scan<false>(logits, begin, end, info) : scan<true>(logits, begin, end, info);
    if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = part;
}

// Grid: rows.
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const float* all_logits, int vocab, const SampleInfo* infos, const SamplePart* parts,
                  int pieces, int* tokens, int* last_token) {
    __shared__ Shared shared;
    __shared__ SamplePart whole;
    allow_next();
    const int row = blockIdx.x;
    const float* logits = all_logits + int64_t(row) * vocab;
    const SampleInfo info = infos[row];
    wait_for_previous();
    if (threadIdx.x < 32) {
        const SamplePart joined = join(parts + row * pieces, pieces);
        if (threadIdx.x == 0) whole = joined;
    }
    __syncthreads();
    const int best = id_of(whole.greatest);
    int token = -1;
    if (whole.finite) {
        if (info.temperature <= 0.f || info.top_k == 1)
            token = best;
        else
            token = draws_from_all(info) ? whole.winner : draw_from_set(logits, vocab, best, info, shared);
    }
    if (threadIdx.x != 0) return;
    tokens[row] = token;
    if (token >= 0) last_token[info.slot] = token;
}

}  // namespace

int sample_pieces(int vocab) {
    return blocks_for(vocab, kPiece);
}

void sample(const float* logits, int vocab, const SampleInfo* info, int count, int* tokens, int* last_token,
            SamplePart* parts, cudaStream_t stream) {
    if (count == 0) return;
    const int pieces = sample_pieces(vocab);
    launch_overlapped(scan_kernel, dim3(pieces, count), kScanThreads, 0, stream, "sample: scan", logits,
                      vocab, info, parts);
    launch_overlapped(choose_kernel, dim3(count), kThreads, 0, stream, "sample: choose", logits, vocab, info,
                      parts, pieces, tokens, last_token);
}

}  // namespace turbomill::cuda
