// Linears that are fused along N: one after the other, or `block` rows of each, of equal size, in turn.
#pragma once

#include <vector>

namespace turbomill {

struct FusedRows {
    std::vector<int> sizes;  // rows of each part
    int block = 0;

    struct Spot {
        int part, row;
        int together;  // rows from there on that are neighbours in the part too
    };

    int n() const {
        int total = 0;
        for (const int size : sizes) total += size;
        return total;
    }

    // Of a fused row below n().
    Spot at(int row) const {
        if (block) {
            const int turn = row / block, count = int(sizes.size());
            return {turn % count, turn / count * block + row % block, block - row % block};
        }
        int part = 0;
        for (; row >= sizes[part]; ++part) row -= sizes[part];
        return {part, row, sizes[part] - row};
    }
};

}  // namespace turbomill
