// KV blocks. A cache block is a physical page of the cache; a logical block is the interval of P tokens of a
// sequence that lives in one. Logical blocks form a trie over what they hold: a block's children continue it,
// so that a new prompt finds the blocks whose keys and values it would compute. Only the engine thread
// touches them.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <set>
#include <vector>

namespace turbomill {

struct Sequence;

// Every page has one, whether it is free, used by sequences, or cached: used by nobody, but findable.
struct LogicalBlock {
    struct ByTokens {
        bool operator()(const LogicalBlock* a, const LogicalBlock* b) const {
            return a->tokens != b->tokens ? a->tokens < b->tokens : a->page < b->page;
        }
    };

    // `nodes`: where memory for its set comes from.
    explicit LogicalBlock(std::pmr::memory_resource* nodes) : children(nodes) {}

    int page = -1;                     // its cache block
    int users = 0;                     // sequences that hold it
    const Sequence* writer = nullptr;  // that fills it, while it runs

    // What it holds as far as it is recorded: [<= P] tokens whose keys and values are in the page, or will be
    // when the steps that were planned have run. Empty: it cannot be found.
    std::vector<int> tokens;
    int64_t step = -1;         // of the plan that recorded the last of them
    int rows_before_step = 0;  // how many there were before that plan
    bool spoiled = false;      // a step that was to write it failed

    LogicalBlock* parent = nullptr;                   // of a recorded block: the one before it
    std::pmr::set<LogicalBlock*, ByTokens> children;  // recorded blocks that continue it
    int64_t last_use = 0;                             // of a cached block: when its last user let go

    // Rows that a step planned as `now` may read: a step does not read what it writes for others.
    int rows(int64_t now) const { return step == now ? rows_before_step : int(tokens.size()); }
};

// What the cache has of a prompt.
struct PrefixMatch {
    std::vector<LogicalBlock*> blocks;  // whole blocks to share
    LogicalBlock* partial = nullptr;    // then a block of which the first `rows` fit, to be copied
    int rows = 0;
    int promised = 0;  // further tokens that sequences which already run are about to compute
};

class BlockPool {
  public:
    // `share`: whether blocks are recorded, found and kept.
    BlockPool(int count, int block_len, bool share);
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;

    int total() const { return int(blocks_.size()); }
    int free() const { return int(free_.size()); }
    int cached() const { return cached_; }
    // Blocks that acquire() can give: cached ones are evicted when no free one is left.
    int available() const { return free() + cached_; }
    int64_t evictions() const { return evictions_; }
    // Tokens from which on it is worth a copy, or a wait, not to compute them.
    int least_rows() const { return least_rows_; }
    const std::vector<LogicalBlock>& blocks() const { return blocks_; }

    // A block for `writer` alone. The least recently used cached block goes when none is free. The caller has
    // checked available().
    LogicalBlock* acquire(const Sequence& writer);
    void share(LogicalBlock& block);
    // The blocks of a sequence that lets go of all of them. What is recorded stays in the cache, ends of
    // sequences being evicted before what they have in common with others.
    void release(const std::vector<LogicalBlock*>& path, const Sequence& sequence);

    // Notes that `block`, which follows `parent` (null: nothing), also holds these tokens, by the plan of
    // `step`.
    void record(LogicalBlock& block, LogicalBlock* parent, const int* begin, const int* end, int64_t step);
    // Of the first `limit` tokens of `tokens`, for a step planned as `now`.
    PrefixMatch match(const std::vector<int>& tokens, int limit, int64_t now);
    // The step that was to write this block failed: nobody finds it, or what continues it, any more.
    void spoil(LogicalBlock& block);
    // Forgets all that is cached.
    void clear();

  private:
    struct ByLastUse {
        bool operator()(const LogicalBlock* a, const LogicalBlock* b) const {
            return a->last_use < b->last_use;
        }
    };

    LogicalBlock* closest_child(LogicalBlock& node, const int* begin, const int* end);
    int pending(const LogicalBlock& block, const std::vector<int>& tokens, int begin, int limit) const;
    bool covered_by_sibling(const LogicalBlock& block) const;
    void unlink(LogicalBlock& block);
    void set_idle(LogicalBlock& block);
    void free_page(LogicalBlock& block);
    void detach(LogicalBlock& block);
    void evict();

    const int block_len_;
    const bool share_;
    const int least_rows_;
    std::pmr::unsynchronized_pool_resource nodes_;  // of the sets below: kept for those to come
    std::vector<LogicalBlock> blocks_;
    std::vector<int> free_;
    LogicalBlock root_;                                  // before every sequence; no page
    std::pmr::set<LogicalBlock*, ByLastUse> evictable_;  // cached blocks that nothing continues
    int cached_ = 0;
    int64_t clock_ = 0;
    int64_t evictions_ = 0;
};

}  // namespace turbomill
