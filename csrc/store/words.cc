#include "store/words.h"

#include <algorithm>

#include "store/tile_w4.h"

namespace turbomill {
namespace {

// Eight neighbouring rows, which lie in one part.
struct Octet {
    const uint32_t* from = nullptr;  // their first word; none beyond the last row
    int64_t step = 0;                // to their next word, or with kNK from a row to the next
};

// A tile in one packing: its eight octets, and its words along K (of kAwq: columns) that there are.
struct Tile {
    Octet octets[8];
    int first, count;
};

struct AwqTile : Tile {
    // Rows in the low halves of a word's bytes, then those in the high ones.
    static constexpr int kRows[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    static constexpr int kAcross = kTile;  // words of a tile along K

    static Octet octet(const uint32_t* part, int n, int, int row) { return {part + row / 8, n / 8}; }

    uint64_t word(const Octet& octet, int column) const {
        return octet.from ? octet.from[(first + column) * octet.step] : 0;
    }
    uint64_t rows(int s, int column) const {
        if (column >= count) return 0;
        const uint64_t a = word(octets[2 * s], column), b = word(octets[2 * s + 1], column);
        return ((a | a << 28) & kLowNibbles) | ((b << 4 | b << 32) & ~kLowNibbles);
    }
    void pack(uint8_t* to) const { pack_by_columns(*this, to); }
};

struct KnTile : Tile {
    static constexpr int kAcross = kTile / 8;

    static Octet octet(const uint32_t* part, int n, int, int row) { return {part + row, n}; }

    uint32_t word(int row, int w) const {
        const Octet& octet = octets[row / 8];
        return octet.from && w < count ? octet.from[(first + w) * octet.step + row % 8] : 0;
    }
    void pack(uint8_t* to) const { pack_by_words(*this, to); }
};

struct NkTile : Tile {
    static constexpr int kAcross = kTile / 8;

    static Octet octet(const uint32_t* part, int, int k, int row) {
        return {part + int64_t(row) * (k / 8), k / 8};
    }

    uint32_t word(int row, int w) const {
        const Octet& octet = octets[row / 8];
        return octet.from && w < count ? octet.from[row % 8 * octet.step + first + w] : 0;
    }
    void pack(uint8_t* to) const { pack_by_words(*this, to); }
};

template <class T>
void pack_tiles(const WordParts& words, int first, int count, uint8_t* out) {
    const int n = words.rows.n(), across = tiles(words.k);
    const int all = T::kAcross == kTile ? words.k : words.k / 8;
    std::vector<T> tile(count);
    for (int bn = 0; bn < count; ++bn)
        for (int i = 0; i < 8; ++i) {
            const int row = (first + bn) * kTile + 8 * i;
            if (row >= n) continue;
            const FusedRows::Spot spot = words.rows.at(row);
            tile[bn].octets[i] =
                T::octet(words.parts[spot.part], words.rows.sizes[spot.part], words.k, spot.row);
        }
    // Tile by tile along N, as words of neighbouring rows are neighbours: of kNK's, the next ones of the same
    // rows are, and each row of tiles stays within a few pages.
    const auto pack = [&](int bn, int bk) {
        T& it = tile[bn];
        it.first = bk * T::kAcross;
        it.count = std::min(T::kAcross, all - it.first);
        it.pack(out + (int64_t(bn) * across + bk) * kTileBytes);
    };
    if (words.packing == Packing::kNK) {
        for (int bn = 0; bn < count; ++bn)
            for (int bk = 0; bk < across; ++bk) pack(bn, bk);
    } else {
        for (int bk = 0; bk < across; ++bk)
            for (int bn = 0; bn < count; ++bn) pack(bn, bk);
    }
}

}  // namespace

void pack_words(const WordParts& words, int first, int count, uint8_t* out) {
    switch (words.packing) {
        case Packing::kAwq:
            return pack_tiles<AwqTile>(words, first, count, out);
        case Packing::kKN:
            return pack_tiles<KnTile>(words, first, count, out);
        case Packing::kNK:
            return pack_tiles<NkTile>(words, first, count, out);
    }
}

}  // namespace turbomill
