// Large blocks of memory on huge pages: streaming weights from 4 KB pages costs a fifth of the bandwidth.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace headrace {

// Anonymous, zeroed, 2 MB aligned; pages become resident when they are first touched.
class Arena {
 public:
  Arena() = default;
  explicit Arena(size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
    if (bytes_ == 0) return;
    mapping_ = mmap(nullptr, bytes_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) {
      mapping_ = nullptr;
      throw std::bad_alloc();
    }
    data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapping_) + kPage - 1) / kPage * kPage);
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  }
  Arena(Arena&& other) noexcept { *this = std::move(other); }
  Arena& operator=(Arena&& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Arena() {
    if (mapping_) munmap(mapping_, bytes_ + kPage);
  }

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  static constexpr size_t kPage = size_t{2} << 20;
  void* mapping_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace headrace
