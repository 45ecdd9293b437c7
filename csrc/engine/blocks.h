// KV blocks. A cache block is a physical page; a logical block is the interval of P tokens of a sequence that
// borrows one. Only the engine thread touches them.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

namespace turbomill {

class CacheBlockPool {
  public:
    explicit CacheBlockPool(int count) : free_(count), total_(count) {
        // Low numbers last, so that they are handed out first and the touched memory stays small.
        std::iota(free_.rbegin(), free_.rend(), 0);
    }

    int total() const { return total_; }
    int available() const { return int(free_.size()); }

    // The caller has checked available().
    int acquire() {
        const int block = free_.back();
        free_.pop_back();
        return block;
    }
    void release(int block) { free_.push_back(block); }

  private:
    std::vector<int> free_;
    int total_;
};

// Shared by the sequences that hold the same tokens; gives its cache block back when the last one lets go.
class LogicalBlock {
  public:
    explicit LogicalBlock(CacheBlockPool& pool) : pool_(pool), cache_block_(pool.acquire()) {}
    ~LogicalBlock() { pool_.release(cache_block_); }
    LogicalBlock(const LogicalBlock&) = delete;
    LogicalBlock& operator=(const LogicalBlock&) = delete;

    int cache_block() const { return cache_block_; }

  private:
    CacheBlockPool& pool_;
    int cache_block_;
};

using BlockRef = std::shared_ptr<LogicalBlock>;

}  // namespace turbomill
