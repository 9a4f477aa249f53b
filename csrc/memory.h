// Large blocks of memory on huge pages: streaming weights from 4 KB pages costs a fifth
// of the bandwidth.
#pragma once
#include <sys/mman.h>
#include <unistd.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <utility>
#include <vector>

namespace headrace {

// Throws std::bad_alloc where the product of sizes is more than any memory has.
inline size_t product(std::initializer_list<int> sizes, size_t bytes) {
  for (const int size : sizes)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes)) throw std::bad_alloc();
  return bytes;
}

// Throws std::bad_alloc for more bytes than this machine has, where all of them will be
// written: an arena is given without asking whether there is so much.
inline void check_fits_memory(size_t bytes) {
  if (bytes / static_cast<size_t>(sysconf(_SC_PAGE_SIZE)) >
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)))
    throw std::bad_alloc();
}

// Anonymous, zeroed, 2 MB aligned; pages become resident when they are first touched.
class Arena {
 public:
  Arena() = default;
  explicit Arena(size_t bytes) {
    if (bytes == 0) return;
    if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
    mapping_ = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) {
      mapping_ = nullptr;
      throw std::bad_alloc();
    }
    bytes_ = bytes;
    data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapping_) + kPage - 1) / kPage *
                                       kPage);
#ifdef MADV_HUGEPAGE
    madvise(data_, mapped(bytes) - kPage, MADV_HUGEPAGE);
#endif
    guard(data_ + bytes, kPage - 1 - (bytes - 1) % kPage);
  }
  Arena(Arena&& other) noexcept { *this = std::move(other); }
  Arena& operator=(Arena&& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(guarded_, other.guarded_);
    return *this;
  }
  ~Arena() {
#if defined(__SANITIZE_ADDRESS__)
    for (const auto& [p, bytes] : guarded_) __asan_unpoison_memory_region(p, bytes);
#endif
    if (mapping_) munmap(mapping_, mapped(bytes_));
  }

  // Tells AddressSanitizer, where it is built in, that these bytes are not to be
  // touched.
  void guard([[maybe_unused]] uint8_t* p, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    guarded_.emplace_back(p, bytes);
    __asan_poison_memory_region(p, bytes);
#endif
  }

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  static constexpr size_t kPage = size_t{2} << 20;
  static size_t mapped(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage + kPage; }
  void* mapping_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  std::vector<std::pair<uint8_t*, size_t>> guarded_;
};

}  // namespace headrace
