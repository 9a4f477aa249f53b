#include "pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace headrace {
namespace {

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::
                   : "memory");  // waits for a few dozen cycles, as x86's pause does; `yield` does
                                 // nothing on most processors
#endif
}

constexpr int kSpins =
    2000;                  // about 20-50 us: longer than any wait inside a step on a quiet machine
constexpr int kShare = 8;  // a chunk is this part of what is left of a range: large ones first,
                           // single items at the end
// How long a worker waits for the next step before it parks: longer than what Python
// does between two steps, short enough not to keep a core from others for long.
constexpr std::chrono::microseconds kLinger{300};

int process_id() {
#if defined(__linux__)
  return static_cast<int>(getpid());
#else
  return 0;
#endif
}

// Processors that this process may run on.
int num_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

void Deal::reset(int items) {
  const int n = static_cast<int>(ranges_.size());
  for (int t = 0; t < n; t++) {
    ranges_[t].next.store(static_cast<int>(static_cast<int64_t>(items) * t / n),
                          std::memory_order_relaxed);
    ranges_[t].end = static_cast<int>(static_cast<int64_t>(items) * (t + 1) / n);
  }
}

bool Deal::next(int thread, int& begin, int& end) {
  const int n = static_cast<int>(ranges_.size());
  for (int i = 0; i < n; i++) {
    Range& range = ranges_[(thread + i) % n];
    const int left = range.end - range.next.load(std::memory_order_relaxed);
    if (left <= 0) continue;
    const int chunk = std::max(1, left / kShare);
    begin = range.next.fetch_add(chunk, std::memory_order_relaxed);
    end = std::min(begin + chunk, range.end);
    if (begin < end) return true;
  }
  return false;
}

Pool::Pool(int threads)
    : threads_(std::max(1, threads)),
      spins_(threads_ > num_processors() ? 0 : kSpins),
      process_(process_id()) {
  try {
    for (int t = 1; t < threads_; t++) workers_.emplace_back([this, t] { work(t); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

bool Pool::is_forked() const { return process_ != process_id(); }

void Pool::stop() {
  if (is_forked()) {  // there are no threads to join here, and a std::thread that was not joined
                      // may not be destroyed
    static_cast<void>(new std::vector<std::thread>(std::move(workers_)));
    return;
  }
  stop_ = true;
  job_number_.fetch_add(1);
  job_number_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// A thread that only gave way to others would be in the way of those that it waits for.
void Pool::wait_change(const std::atomic<uint32_t>& value, uint32_t old) const {
  for (int spins = 0; spins < spins_; spins++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_cpu();
  }
  value.wait(old, std::memory_order_acquire);
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    const auto deadline = std::chrono::steady_clock::now() + kLinger;
    while (spins_ > 0 && job_number_.load(std::memory_order_acquire) == seen &&
           std::chrono::steady_clock::now() < deadline)
      for (int spins = 0; spins < 64 && job_number_.load(std::memory_order_acquire) == seen;
           spins++)
        pause_cpu();
    job_number_.wait(seen, std::memory_order_acquire);
    seen = job_number_.load(std::memory_order_acquire);
    if (stop_) return;
    error_->guard([&] { (*job_)(thread); });
    if (running_.fetch_sub(1) == 1) running_.notify_one();
  }
}

void Pool::keep_off_caller() {
#if defined(__linux__)
  const int cpu = sched_getcpu();
  if (cpu == caller_cpu_ || cpu < 0) return;
  caller_cpu_ = cpu;
  cpu_set_t others;
  if (sched_getaffinity(0, sizeof others, &others) != 0) return;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) < threads_ - 1) return;
  for (auto& worker : workers_)
    pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
#endif
}

void Pool::run(const std::function<void(int)>& job) {
  if (threads_ == 1) return job(0);
  if (is_forked())
    throw std::runtime_error("this process was forked, and the threads are not in it");
  if (in_use_.exchange(true))
    throw std::runtime_error("the threads are at work for another caller: one at a time");
  keep_off_caller();
  FirstError error;
  job_ = &job;
  error_ = &error;
  running_.store(static_cast<uint32_t>(threads_ - 1), std::memory_order_relaxed);
  job_number_.fetch_add(1);
  job_number_.notify_all();
  error.guard([&] { job(0); });
  for (uint32_t left; (left = running_.load(std::memory_order_acquire)) != 0;)
    wait_change(running_, left);
  in_use_.store(false, std::memory_order_release);
  error.rethrow();
}

void Pool::parallel(int items, const std::function<void(int, int, int)>& body) {
  Deal deal(threads_);
  deal.reset(items);
  run([&](int thread) {
    int begin, end;
    while (deal.next(thread, begin, end)) body(begin, end, thread);
  });
}

}  // namespace headrace
