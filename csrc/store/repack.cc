#include "store/repack.h"

#include <algorithm>
#include <cstring>

#include "store/tile_w4.h"

namespace turbomill {
namespace {

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
    for (int done = 0; done < rows;) {
        const FusedRows::Spot spot = codes.rows.at(first + done);
        const int together = std::min(spot.together, rows - done);
        runs.push_back({codes.parts[spot.part] + spot.row, codes.rows.sizes[spot.part], done, together});
        done += together;
    }
    return runs;
}

// The codes of a tile, as they lie in [K, N].
struct CodeTile {
    static constexpr int kRows[8] = {0, 1, 2, 3, 4, 5, 6, 7};

    uint8_t codes[kTile][kTile];  // [column, row]

    uint64_t rows(int s, int column) const {
        uint64_t low, high;
        std::memcpy(&low, codes[column] + 16 * s, 8);
        std::memcpy(&high, codes[column] + 16 * s + 8, 8);
        return low | high << 4;
    }
};

}  // namespace

void pack_w4(const CodeParts& codes, int k, uint8_t* out, ThreadPool& pool) {
    const int n = codes.rows.n();
    pool.run(tiles(n), [&](int bn, int) {
        const int rows = std::min(kTile, n - bn * kTile);
        const std::vector<Run> runs = runs_of(codes, bn * kTile, rows);
        CodeTile tile;
        for (int bk = 0; bk < tiles(k); ++bk) {
            const int columns = std::min(kTile, k - bk * kTile);
            if (rows < kTile || columns < kTile) std::memset(tile.codes, 0, sizeof tile.codes);
            for (const Run& run : runs) {
                const uint8_t* from = run.from + int64_t(bk) * kTile * run.stride;
                for (int c = 0; c < columns; ++c, from += run.stride) {
                    if (run.count == 8)
                        std::memcpy(tile.codes[c] + run.to, from, 8);
                    else
                        std::memcpy(tile.codes[c] + run.to, from, run.count);
                }
            }
            pack_by_columns(tile, out + (int64_t(bn) * tiles(k) + bk) * kTileBytes);
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
