#include "packing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

namespace headrace {
namespace {

// Stored bytes of a piece: few enough that threads end together, and enough that calls of the
// kernel cost little.
constexpr size_t kPieceBytes = size_t{1} << 20;

#ifdef MADV_POPULATE_READ
constexpr int kPopulate = MADV_POPULATE_READ;
#else
constexpr int kPopulate = 22;  // of Linux 5.14, which older headers lack
#endif

// Maps the pages of a file that hold these bytes, which takes less time together than one by
// one. Returns false for pages that cannot be read: the file was cut short, or its disk fails.
bool map_pages(const uint8_t* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(data), begin = at / page * page;
  for (;;) {
    if (madvise(reinterpret_cast<void*>(begin), at + bytes - begin, kPopulate) == 0) return true;
    if (errno == EINTR || errno == EAGAIN) continue;
    return errno == EINVAL;  // the kernel does not know this advice
  }
}

// Gives back whole pages alone: others belong to the neighbours too.
void release_pages(const uint8_t* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(data), begin = (at + page - 1) / page * page,
             end = (at + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace

Packing::~Packing() {
  stop_ = true;
  if (!thread_) return;
  if (pool_->is_forked()) {  // there is no thread to join here
    static_cast<void>(thread_.release());
    return;
  }
  thread_->join();
}

void Packing::add(Matrix matrix) {
  join();
  const int tiles = matrix.weight.tiles();
  const size_t bytes = matrix.stored.bytes / static_cast<size_t>(tiles) + 1;
  const int step = static_cast<int>(std::max<size_t>(1, kPieceBytes / bytes));
  for (int begin = 0; begin < tiles; begin += step)
    pieces_.push_back({matrices_.size(), begin, std::min(begin + step, tiles)});
  matrices_.push_back(std::move(matrix));
}

void Packing::start() {
  if (thread_ || matrices_.empty()) return;
  done_ = false;
  try {
    thread_ = std::make_unique<std::thread>([this] {
      pack();
      const std::lock_guard lock(mutex_);
      done_ = true;
      changed_.notify_all();
    });
  } catch (const std::system_error&) {
    pack();  // without a thread, the caller does it
    finish();
  }
}

bool Packing::wait_for(int milliseconds) {
  start();
  if (!thread_) return true;
  {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return done_; }))
      return false;
  }
  thread_->join();
  thread_.reset();
  finish();
  return true;
}

void Packing::wait() {
  while (!wait_for(1000)) {
  }
}

void Packing::finish() {
  matrices_.clear();
  pieces_.clear();
  next_ = 0;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Packing::pack() {
  try {
    left_ = std::vector<std::atomic<int>>(matrices_.size());
    for (const Piece& piece : pieces_) left_[piece.matrix]++;
    pool_->run([&](int) {
      for (size_t i; !stop_ && (i = next_.fetch_add(1)) < pieces_.size();) pack(pieces_[i]);
    });
  } catch (...) {
    error_ = std::current_exception();
  }
}

void Packing::pack(const Piece& piece) {
  const Matrix& matrix = matrices_[piece.matrix];
  const Stored& stored = matrix.stored;
  if (matrix.mapped) {
    // Rows in another order may be anywhere in the matrix.
    const bool in_order = stored.row_order.empty();
    const size_t row = stored.bytes / static_cast<size_t>(stored.rows);
    const size_t first = in_order ? row * piece.begin * kTileRows : 0;
    const size_t last =
        in_order ? std::min(row * piece.end * kTileRows, stored.bytes) : stored.bytes;
    if (!map_pages(stored.data + first, last - first)) {
      int none = -1;
      unreadable_.compare_exchange_strong(none, matrix.number);
      stop_ = true;
      return;
    }
  }
  pack_tiles(stored, matrix.weight, piece.begin, piece.end);
  if (--left_[piece.matrix] == 0 && matrix.mapped) release_pages(stored.data, stored.bytes);
}

}  // namespace headrace
