// A tile of w4.n64k64 (convert/FORMAT.md): 64 rows of 64 columns in 2048 bytes, four sub-tiles of 16 rows.
// Where each code goes is said here; what packs tiles differs in where it finds the codes, its Source.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace turbomill {

static_assert(std::endian::native == std::endian::little, "eight codes are handled as one number");

constexpr int kTile = 64, kTileBytes = kTile * kTile / 2, kSubTileBytes = kTileBytes / 4;
constexpr uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0full;

inline int tiles(int size) {
    return (size + kTile - 1) / kTile;
}

// Lane 4 g + t of a sub-tile has a byte for each of 16 columns: row g in its low half, row g + 8 in its high
// one. Place says which t a tile's column belongs to, and which byte it is.
struct Place {
    int lane, byte;
    explicit Place(int column)
        : lane(column % 8 / 2), byte(column / 16 * 4 + column % 2 * 2 + column % 16 / 8) {}
};

// The inverse of Place.
inline int column_of(int lane, int byte) {
    return byte / 4 * 16 + byte % 2 * 8 + lane * 2 + byte / 2 % 2;
}

using Bytes16 = uint8_t __attribute__((vector_size(16)));

inline Bytes16 both(uint64_t a, uint64_t b) {
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

// 16 rows of eight bytes become eight of 16: column c of the rows goes to `to` + 16 lanes[c].
inline void transpose(const uint64_t (&rows)[16], uint8_t* to, const int (&lanes)[8]) {
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
        std::memcpy(to + 16 * lanes[2 * quarter], &first, 16);
        std::memcpy(to + 16 * lanes[2 * quarter + 1], &second, 16);
    }
}

// From a source of columns. `source.rows(s, c)` is column c of sub-tile s: in byte i, the codes of rows
// g = Source::kRows[i] (low half) and g + 8.
template <class Source>
void pack_by_columns(const Source& source, uint8_t* to) {
    for (int s = 0; s < 4; ++s, to += kSubTileBytes)
        for (int t = 0; t < 4; ++t) {
            uint64_t rows[16];
            for (int byte = 0; byte < 16; ++byte) rows[byte] = source.rows(s, column_of(t, byte));
            int lanes[8];
            for (int i = 0; i < 8; ++i) lanes[i] = 4 * Source::kRows[i] + t;
            transpose(rows, to, lanes);
        }
}

// From a source of words of eight columns each, low nibbles first. `source.word(r, w)` is word w of the
// tile's row r.
template <class Source>
void pack_by_words(const Source& source, uint8_t* to) {
    for (int s = 0; s < 4; ++s, to += kSubTileBytes)
        for (int g = 0; g < 8; g += 2) {  // two rows, and the two eight below them
            uint64_t rows[16];
            for (int w = 0; w < 8; ++w) {
                const auto two = [&](int r) {
                    return source.word(r, w) | uint64_t(source.word(r + 1, w)) << 32;
                };
                const uint64_t a = two(16 * s + g), b = two(16 * s + g + 8);
                // Byte t of a word is its columns 2 t and 2 t + 1, and t their lane.
                rows[Place(8 * w).byte] = (a & kLowNibbles) | (b & kLowNibbles) << 4;
                rows[Place(8 * w + 1).byte] = (a >> 4 & kLowNibbles) | (b & ~kLowNibbles);
            }
            transpose(rows, to,
                      {4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3, 4 * g + 4, 4 * g + 5, 4 * g + 6, 4 * g + 7});
        }
}

}  // namespace turbomill
