#include "store/repack.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace turbomill {
namespace {

static_assert(std::endian::native == std::endian::little, "rows of eight codes are handled as one number");

constexpr int kTile = 64, kTileBytes = kTile * kTile / 2, kSubTileBytes = kTileBytes / 4;
constexpr uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0full;

int tiles(int size) {
    return (size + kTile - 1) / kTile;
}

// Where, in a lane's 16 bytes, the code of a tile's column is, and which of four lanes that is.
struct Place {
    int lane, byte;
    explicit Place(int column)
        : lane(column % 8 / 2), byte(column / 16 * 4 + column % 2 * 2 + column % 16 / 8) {}
};

// The inverse of Place.
int column_of(int lane, int byte) {
    return byte / 4 * 16 + byte % 2 * 8 + lane * 2 + byte / 2 % 2;
}

// Where a row's 64 codes begin in a tile of w8.n64k64: after row g of a sub-tile comes row g + 8.
int wide_row(int row) {
    return row / 16 * 1024 + row % 8 * 128 + row % 16 / 8 * 64;
}

// The nibbles of 16 bits in the low nibbles of four 16-bit numbers.
uint64_t spread(uint64_t nibbles) {
    nibbles = (nibbles | nibbles << 24) & 0x000000ff000000ffull;
    return (nibbles | nibbles << 12) & 0x000f000f000f000full;
}

// Rows of a tile that lie together in one part.
struct Run {
    const uint8_t* from;  // of column 0
    int stride;           // from a column to the next
    int to, count;        // rows of the tile
};

std::vector<Run> runs_of(const CodeParts& codes, int first, int rows) {
    std::vector<Run> runs;
    const int count = int(codes.parts.size());
    for (int done = 0; done < rows;) {
        int row = first + done, part = 0, together;
        if (codes.block) {
            const int at = row % codes.block, turn = row / codes.block;
            part = turn % count;
            row = turn / count * codes.block + at;
            together = codes.block - at;
        } else {
            for (; row >= codes.parts[part].n; ++part) row -= codes.parts[part].n;
            together = codes.parts[part].n - row;
        }
        together = std::min(together, rows - done);
        runs.push_back({codes.parts[part].codes + row, codes.parts[part].n, done, together});
        done += together;
    }
    return runs;
}

using Bytes16 = uint8_t __attribute__((vector_size(16)));

Bytes16 both(uint64_t a, uint64_t b) {
    using Words = uint64_t __attribute__((vector_size(16)));
    return Bytes16(Words{a, b});
}

// Numbers of `Size` bytes of the lower (upper) halves of two vectors in turn.
template <int Size, bool Upper>
Bytes16 interleave(Bytes16 a, Bytes16 b) {
    Bytes16 order;
    for (int i = 0; i < 16; ++i)
        order[i] = uint8_t(i / Size % 2 * 16 + (Upper ? 8 : 0) + i / Size / 2 * Size + i % Size);
    return __builtin_shuffle(a, b, order);
}

// 16 rows of eight bytes become eight of 16, `stride` apart.
void transpose(const uint64_t (&rows)[16], uint8_t* to, int stride) {
    Bytes16 pairs[8], fours[2][4], eights[4][2];  // of rows; the halves, quarters of their columns
    for (int i = 0; i < 8; ++i)
        pairs[i] = interleave<1, false>(both(rows[2 * i], 0), both(rows[2 * i + 1], 0));
    for (int i = 0; i < 4; ++i) {
        fours[0][i] = interleave<2, false>(pairs[2 * i], pairs[2 * i + 1]);
        fours[1][i] = interleave<2, true>(pairs[2 * i], pairs[2 * i + 1]);
    }
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 2; ++i) {
            eights[2 * half][i] = interleave<4, false>(fours[half][2 * i], fours[half][2 * i + 1]);
            eights[2 * half + 1][i] = interleave<4, true>(fours[half][2 * i], fours[half][2 * i + 1]);
        }
    for (int quarter = 0; quarter < 4; ++quarter) {
        const Bytes16 first = interleave<8, false>(eights[quarter][0], eights[quarter][1]),
                      second = interleave<8, true>(eights[quarter][0], eights[quarter][1]);
        std::memcpy(to + 2 * quarter * stride, &first, 16);
        std::memcpy(to + (2 * quarter + 1) * stride, &second, 16);
    }
}

}  // namespace

int CodeParts::n() const {
    int total = 0;
    for (const Part& part : parts) total += part.n;
    return total;
}

void pack_w4(const CodeParts& codes, int k, uint8_t* out, ThreadPool& pool) {
    const int n = codes.n();
    pool.run(tiles(n), [&](int bn, int) {
        const int rows = std::min(kTile, n - bn * kTile);
        const std::vector<Run> runs = runs_of(codes, bn * kTile, rows);
        uint8_t tile[kTile][kTile];  // [column, row]: as the codes lie
        for (int bk = 0; bk < tiles(k); ++bk) {
            const int columns = std::min(kTile, k - bk * kTile);
            if (rows < kTile || columns < kTile) std::memset(tile, 0, sizeof tile);
            for (const Run& run : runs) {
                const uint8_t* from = run.from + int64_t(bk) * kTile * run.stride;
                for (int c = 0; c < columns; ++c, from += run.stride) {
                    if (run.count == 8)
                        std::memcpy(tile[c] + run.to, from, 8);
                    else
                        std::memcpy(tile[c] + run.to, from, run.count);
                }
            }
            uint8_t* to = out + (int64_t(bn) * tiles(k) + bk) * kTileBytes;
            // Lane 4 g + t of a sub-tile has its rows g and g + 8, of 16 columns.
            for (int s = 0; s < 4; ++s)
                for (int t = 0; t < 4; ++t) {
                    uint64_t pairs[16];  // [byte of the lane], of eight rows and the eight below them
                    for (int byte = 0; byte < 16; ++byte) {
                        const uint8_t* column = tile[column_of(t, byte)] + 16 * s;
                        uint64_t low, high;
                        std::memcpy(&low, column, 8);
                        std::memcpy(&high, column + 8, 8);
                        pairs[byte] = low | high << 4;
                    }
                    transpose(pairs, to + s * kSubTileBytes + t * 16, 64);
                }
        }
    });
}

void unpack_w4(const uint8_t* packed, int k, int n, uint8_t* codes, ThreadPool& pool) {
    pool.run(tiles(n), [&](int bn, int) {
        const int rows = std::min(kTile, n - bn * kTile);
        for (int bk = 0; bk < tiles(k); ++bk) {
            const int columns = std::min(kTile, k - bk * kTile);
            const uint8_t* from = packed + (int64_t(bn) * tiles(k) + bk) * kTileBytes;
            for (int c = 0; c < columns; ++c) {
                const Place place(c);
                uint8_t column[kTile];
                for (int s = 0; s < 4; ++s) {
                    const uint8_t* lane = from + s * kSubTileBytes + place.lane * 16 + place.byte;
                    uint64_t pairs = 0;
                    for (int g = 0; g < 8; ++g) pairs |= uint64_t(lane[g * 64]) << 8 * g;
                    const uint64_t low = pairs & kLowNibbles, high = pairs >> 4 & kLowNibbles;
                    std::memcpy(column + 16 * s, &low, 8);
                    std::memcpy(column + 16 * s + 8, &high, 8);
                }
                std::memcpy(codes + (int64_t(bk) * kTile + c) * n + bn * kTile, column, rows);
            }
        }
    });
}

void pack_w8(const uint8_t* codes, int k, int n, uint8_t* out, ThreadPool& pool) {
    pool.run(tiles(n), [&](int bn, int) {
        const int rows = std::min(kTile, n - bn * kTile);
        uint8_t* to = out + int64_t(bn) * tiles(k) * kTile * kTile;
        std::memset(to, 0, int64_t(tiles(k)) * kTile * kTile);
        for (int column = 0; column < k; ++column) {
            const Place place(column % kTile);
            uint8_t* lane = to + int64_t(column / kTile) * kTile * kTile + place.lane * 16 + place.byte;
            const uint8_t* from = codes + int64_t(column) * n + bn * kTile;
            for (int r = 0; r < rows; ++r) lane[wide_row(r)] = from[r];
        }
    });
}

void unpack_w8(const uint8_t* packed, int k, int n, uint8_t* codes, ThreadPool& pool) {
    pool.run(tiles(n), [&](int bn, int) {
        const int rows = std::min(kTile, n - bn * kTile);
        const uint8_t* from = packed + int64_t(bn) * tiles(k) * kTile * kTile;
        for (int column = 0; column < k; ++column) {
            const Place place(column % kTile);
            const uint8_t* lane =
                from + int64_t(column / kTile) * kTile * kTile + place.lane * 16 + place.byte;
            uint8_t* to = codes + int64_t(column) * n + bn * kTile;
            for (int r = 0; r < rows; ++r) to[r] = lane[wide_row(r)];
        }
    });
}

void unpack_awq(const uint32_t* words, int rows, int n, uint8_t* codes, ThreadPool& pool) {
    pool.run(rows, [&](int r, int) {
        const uint32_t* row = words + int64_t(r) * (n / 8);
        for (int i = 0; i < n / 8; ++i) {
            const uint64_t eight = spread(row[i] & 0xffff) | spread(row[i] >> 16) << 8;
            std::memcpy(codes + int64_t(r) * n + 8 * i, &eight, 8);
        }
    });
}

void unpack_nibbles(const uint32_t* words, int k, int n, uint8_t* codes, ThreadPool& pool) {
    pool.run((k + 7) / 8, [&](int r, int) {
        const uint32_t* row = words + int64_t(r) * n;
        for (int i = 0; i < std::min(8, k - 8 * r); ++i) {
            uint8_t* to = codes + (int64_t(r) * 8 + i) * n;
            for (int c = 0; c < n; ++c) to[c] = row[c] >> 4 * i & 15;
        }
    });
}

}  // namespace turbomill
