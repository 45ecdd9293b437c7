#include "engine/blocks.h"

#include <algorithm>
#include <numeric>

#include "engine/sequence.h"

namespace turbomill {
namespace {

// Length of what both begin with.
int common(const int* a, const int* a_end, const int* b, const int* b_end) {
    return int(std::mismatch(a, a_end, b, b_end).first - a);
}

}  // namespace

BlockPool::BlockPool(int count, int block_len, bool share)
    : block_len_(block_len),
      share_(share),
      least_rows_(std::max(1, block_len / 4)),
      free_(count),
      root_(&nodes_),
      evictable_(&nodes_) {
    blocks_.reserve(count);
    for (int i = 0; i < count; ++i) blocks_.emplace_back(&nodes_).page = i;
    // Low numbers last, so that they are handed out first and the touched memory stays small.
    std::iota(free_.rbegin(), free_.rend(), 0);
}

LogicalBlock* BlockPool::acquire(const Sequence& writer) {
    if (free_.empty()) evict();
    LogicalBlock& block = blocks_[free_.back()];
    free_.pop_back();
    block.users = 1;
    block.writer = &writer;
    return &block;
}

void BlockPool::share(LogicalBlock& block) {
    if (block.users++ > 0) return;
    --cached_;
    evictable_.erase(&block);
}

void BlockPool::release(const std::vector<LogicalBlock*>& path, const Sequence& sequence) {
    // From the end: what has become a leaf by then can be dropped where another block holds the same.
    for (auto it = path.rbegin(); it != path.rend(); ++it) {
        LogicalBlock& block = **it;
        if (block.writer == &sequence) block.writer = nullptr;
        if (--block.users > 0) continue;
        if (block.tokens.empty() || (block.children.empty() && covered_by_sibling(block))) {
            free_page(block);
        } else {
            set_idle(block);
        }
    }
}

void BlockPool::set_idle(LogicalBlock& block) {
    block.last_use = ++clock_;
    ++cached_;
    if (block.children.empty()) evictable_.insert(&block);
}

void BlockPool::free_page(LogicalBlock& block) {
    unlink(block);
    block.tokens.clear();
    block.step = -1;
    block.rows_before_step = 0;
    block.spoiled = false;
    block.writer = nullptr;
    free_.push_back(block.page);
}

void BlockPool::unlink(LogicalBlock& block) {
    LogicalBlock* parent = block.parent;
    if (!parent) return;
    parent->children.erase(&block);
    block.parent = nullptr;
    if (parent != &root_ && parent->users == 0 && parent->children.empty()) evictable_.insert(parent);
}

void BlockPool::evict() {
    LogicalBlock& oldest = **evictable_.begin();
    evictable_.erase(evictable_.begin());
    --cached_;
    ++evictions_;
    free_page(oldest);
}

bool BlockPool::covered_by_sibling(const LogicalBlock& block) const {
    const auto& siblings = block.parent->children;
    const auto it = siblings.find(const_cast<LogicalBlock*>(&block));
    const auto covers = [&](const LogicalBlock* other) {
        return other->tokens.size() >= block.tokens.size() &&
               std::equal(block.tokens.begin(), block.tokens.end(), other->tokens.begin());
    };
    return (it != siblings.begin() && covers(*std::prev(it))) ||
           (std::next(it) != siblings.end() && covers(*std::next(it)));
}

void BlockPool::record(LogicalBlock& block, LogicalBlock* parent, const int* begin, const int* end,
                       int64_t step) {
    if (!share_ || block.spoiled) return;
    if (!parent) parent = &root_;
    if (parent != &root_ && parent->tokens.empty()) return;  // spoiled: what continues it is not found either
    if (block.parent) parent->children.erase(&block);
    if (block.step != step) {
        block.step = step;
        block.rows_before_step = int(block.tokens.size());
    }
    block.tokens.reserve(block_len_);
    block.tokens.insert(block.tokens.end(), begin, end);
    block.parent = parent;
    parent->children.insert(&block);
}

// Among blocks in lexicographic order, the one that has most in common with a text is its neighbour.
LogicalBlock* BlockPool::closest_child(LogicalBlock& node, const int* begin, const int* end) {
    LogicalBlock text(std::pmr::null_memory_resource());
    text.tokens.assign(begin, end);
    const auto after = node.children.lower_bound(&text);
    LogicalBlock* closest = nullptr;
    int most = 0;
    const auto consider = [&](LogicalBlock* child) {
        const int* tokens = child->tokens.data();
        const int length = common(begin, end, tokens, tokens + child->tokens.size());
        if (length > most) {
            most = length;
            closest = child;
        }
    };
    if (after != node.children.end()) consider(*after);
    if (after != node.children.begin()) consider(*std::prev(after));
    return closest;
}

// Tokens from `begin` on that the block's writer has not been scheduled to run yet, but will.
int BlockPool::pending(const LogicalBlock& block, const std::vector<int>& tokens, int begin,
                       int limit) const {
    const Sequence* writer = block.writer;
    if (!writer || writer->finished || writer->blocks.empty() || writer->blocks.back() != &block) return 0;
    if (writer->recorded != begin || writer->scheduled != begin) return 0;  // it decodes, or is elsewhere
    const int* own = writer->tokens.data();
    return common(tokens.data() + begin, tokens.data() + limit, own + begin, own + writer->tokens.size());
}

PrefixMatch BlockPool::match(const std::vector<int>& tokens, int limit, int64_t now) {
    PrefixMatch found;
    LogicalBlock* node = &root_;
    int at = 0;
    while (at < limit) {
        const int* begin = tokens.data() + at;
        const int* end = tokens.data() + std::min(limit, at + block_len_);
        LogicalBlock* child = closest_child(*node, begin, end);
        if (!child) {
            found.promised += pending(*node, tokens, at, limit);
            return found;
        }
        const int same =
            common(begin, end, child->tokens.data(), child->tokens.data() + child->tokens.size());
        const int ready = std::min(same, child->rows(now));
        if (ready == block_len_ && found.promised == 0) {
            found.blocks.push_back(child);
        } else {
            if (found.promised == 0 && ready >= least_rows_) {
                found.partial = child;
                found.rows = ready;
            }
            found.promised += found.promised ? same : same - ready;
            if (same < block_len_) {
                if (same == int(child->tokens.size()))
                    found.promised += pending(*child, tokens, at + same, limit);
                return found;
            }
        }
        at += same;
        node = child;
    }
    return found;
}

void BlockPool::detach(LogicalBlock& block) {
    while (!block.children.empty()) detach(**block.children.begin());
    if (block.users > 0) {
        unlink(block);
        block.tokens.clear();
        return;
    }
    evictable_.erase(&block);
    --cached_;
    free_page(block);
}

void BlockPool::spoil(LogicalBlock& block) {
    block.spoiled = true;
    detach(block);
}

void BlockPool::clear() {
    while (!evictable_.empty()) evict();
}

}  // namespace turbomill
