// Memory between two pages that may not be touched: a read or write just outside of it ends the program.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace guarded {

enum class Side : uint8_t { kStart, kEnd };

// One block of such memory, reused from call to call and enlarged where it does not suffice.
class Arena {
 public:
  Arena() = default;
  ~Arena() { release(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // `bytes` bytes, all of them `fill`, that begin `shift` bytes behind the first forbidden page, or end `shift` bytes
  // before the second.
  uint8_t* take(size_t bytes, Side side = Side::kEnd, size_t shift = 0, int fill = 0xFF) {
    if (first_ == nullptr || bytes + shift > size_) allocate(bytes + shift + 1);  // no bytes have a place, too
    uint8_t* at = side == Side::kStart ? first_ + shift : first_ + size_ - shift - bytes;
    std::memset(at, fill, bytes);
    return at;
  }

 private:
  void allocate(size_t bytes) {
    release();
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page;
    void* base = mmap(nullptr, size_ + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) std::abort();
    first_ = static_cast<uint8_t*>(base) + page;
    if (mprotect(base, page, PROT_NONE) != 0 || mprotect(first_ + size_, page, PROT_NONE) != 0) std::abort();
  }
  void release() {
    if (first_ == nullptr) return;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    munmap(first_ - page, size_ + 2 * page);
    first_ = nullptr;
    size_ = 0;
  }

  uint8_t* first_ = nullptr;
  size_t size_ = 0;
};

}  // namespace guarded
