#include "kv_pages.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace headrace {
namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kMostAhead = size_t{64} << 20;  // what prompts of 1B models fill in a second

// Makes a page resident, and leaves its bytes as they are. False if the kernel cannot (before
// Linux 5.14), or has no memory.
bool populate([[maybe_unused]] uint8_t* page, [[maybe_unused]] size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  return madvise(page, bytes, MADV_POPULATE_WRITE) == 0;
#else
  return false;
#endif
}

}  // namespace

size_t kv_bytes_ahead(size_t bytes) { return std::min(bytes / 8, kMostAhead) / kPage * kPage; }

KvPages::KvPages(uint8_t* data, size_t bytes)
    : data_(data), bytes_(bytes), ahead_(kv_bytes_ahead(bytes)), process_(getpid()) {}

KvPages::~KvPages() {
  if (!thread_.joinable()) return;
  if (getpid() != process_) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void KvPages::use(size_t bytes) {
  if (!ahead_ || (thread_.joinable() && bytes <= used_.load(std::memory_order_relaxed))) return;
  {
    const std::lock_guard lock(mutex_);
    used_.store(std::max(bytes, used_.load(std::memory_order_relaxed)), std::memory_order_relaxed);
  }
  if (thread_.joinable())
    changed_.notify_one();
  else if (getpid() == process_)
    thread_ = std::thread([this] { work(); });
}

void KvPages::work() {
  const sched_param none = {};
  sched_setscheduler(0, SCHED_IDLE, &none);  // a thread of a step that is preempted holds up all
  size_t resident = 0;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const size_t used = used_.load(std::memory_order_relaxed);
    // What is in use, the steps write themselves.
    resident = std::max(resident, used / kPage * kPage);
    if (resident >= std::min(used + ahead_, bytes_)) {
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    const bool done = populate(data_ + resident, std::min(kPage, bytes_ - resident));
    lock.lock();
    if (!done) return;
    resident += kPage;
  }
}

}  // namespace headrace
