// Handing out work items.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "futex.h"

namespace cpu_moe::sys {

// Items 0..n-1, cut into one contiguous range per rank. A rank takes its own items in ascending order, so that its
// reads form one stream; when they are used up it takes from the other ranks, from the far end of their ranges, so that
// the owner's stream, and what it has prefetched, stay as they are. A slow or preempted thread thus delays at most the
// item it is working on. Every item is given to exactly one caller.
class WorkRanges {
 public:
  // Only before the team starts, or by one rank between two barriers. n >= 0, size >= 1. Allocates when `size` exceeds
  // every earlier one. A team larger or smaller than `size` is fine: the ranks without a range take from the others.
  void reset(int64_t n, int size) {
    if (n < 0 || size < 1 || n / size >= INT32_MAX) throw std::invalid_argument("WorkRanges: bad item count or size");
    if (size > capacity_) {
      ranges_ = std::make_unique<Range[]>(static_cast<std::size_t>(size));
      capacity_ = size;
    }
    size_ = size;
    const int64_t each = n / size, extra = n % size;
    for (int r = 0; r < size; ++r) {
      Range& range = ranges_[r];
      range.base = r * each + std::min<int64_t>(r, extra);
      range.left.store(static_cast<uint64_t>(each + (r < extra)) << 32, std::memory_order_relaxed);
      range.victim = r;
    }
  }

  // The next item for `rank`; false when there is none left anywhere (other ranks may still be working on theirs).
  bool next(int rank, int64_t& item) {
    if (size_ == 0) return false;
    const bool own = rank < size_;
    if (own && take<kFront>(ranges_[rank], item)) return true;
    int victim = own ? ranges_[rank].victim : rank % size_;
    for (int i = 0; i < size_; ++i) {
      if (take<kBack>(ranges_[victim], item)) {
        if (own) ranges_[rank].victim = victim;  // go on there, instead of searching again
        return true;
      }
      if (++victim == size_) victim = 0;
    }
    return false;
  }

  // The item that next(rank) will most likely give, or -1 when the own range is used up. For prefetching.
  int64_t peek_next(int rank) const {
    if (rank >= size_) return -1;
    const uint64_t left = ranges_[rank].left.load(std::memory_order_relaxed);
    return front(left) < back(left) ? ranges_[rank].base + front(left) : -1;
  }

 private:
  // [front, back) relative to `base`, packed into one word (front low, back high) so that both ends move atomically.
  // Taking from an empty range moves an end as well, and leaves it empty: back may fall below front, and below 0.
  struct alignas(kCacheLine) Range {
    std::atomic<uint64_t> left{0};
    int64_t base = 0;
    int victim = 0;  // touched by the owner only
  };
  enum End { kFront, kBack };

  static int32_t front(uint64_t left) { return static_cast<int32_t>(left & 0xffffffffu); }
  static int32_t back(uint64_t left) { return static_cast<int32_t>(left >> 32); }

  template <End end>
  static bool take(Range& range, int64_t& item) {
    // Looking first keeps the line shared once a range is empty, and bounds how far its ends can move.
    uint64_t left = range.left.load(std::memory_order_relaxed);
    if (front(left) >= back(left)) return false;
    left = end == kFront ? range.left.fetch_add(1, std::memory_order_relaxed)
                         : range.left.fetch_sub(uint64_t{1} << 32, std::memory_order_relaxed);
    if (front(left) >= back(left)) return false;
    item = range.base + (end == kFront ? front(left) : back(left) - 1);
    return true;
  }

  std::unique_ptr<Range[]> ranges_;
  int capacity_ = 0;
  int size_ = 0;
};

}  // namespace cpu_moe::sys
