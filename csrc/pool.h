// The thread pool: n - 1 workers and the calling thread. Workers spin between the
// regions of a step and for a short while between steps, then park. They keep off the
// processor that the caller runs on: a kernel likes to wake a thread beside the one
// that woke it, and there it would wait until the caller, which does not sleep, is
// preempted.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace headrace {

// Items 0..n of one parallel region, dealt in chunks: each thread has a contiguous
// range (one linear stream through the weights) and helps the others when its own is
// done, so that a preempted thread does not hold up the rest.
class Deal {
 public:
  explicit Deal(int threads) : ranges_(static_cast<size_t>(threads)) {}
  void reset(int items);
  // The next chunk for `thread`, or false when nothing is left.
  bool next(int thread, int& begin, int& end);

 private:
  struct alignas(64) Range {
    std::atomic<int> next{0};
    int end = 0;
  };
  std::vector<Range> ranges_;
};

// Of the exceptions that threads met, the first to come: it is thrown again where all
// of them are done.
class FirstError {
 public:
  // Calls f, and keeps what it throws.
  template <class F>
  void guard(F&& f) {
    try {
      f();
    } catch (...) {
      if (!is_set_.exchange(true)) error_ = std::current_exception();
    }
  }
  explicit operator bool() const { return is_set_.load(std::memory_order_acquire); }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> is_set_{false};
  std::exception_ptr error_;
};

class Pool {
 public:
  // Throws std::system_error if a thread cannot be started.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Whether this process was forked from that of the workers.
  bool is_forked() const;

  // Runs job(thread) on every thread and returns when all are done, or throws what one
  // of them threw. Throws std::runtime_error to a second caller at the same time, and
  // in a process that was forked from that of the workers.
  void run(const std::function<void(int)>& job);

  // Waits for all threads; the last to arrive runs `between` before any goes on. Called
  // by every thread inside run().
  template <class F>
  void barrier(F&& between) {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      between();
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1);  // see wait_change
      generation_.notify_all();
    } else {
      wait_change(generation_, generation);
    }
  }

  // Deals `items` to all threads: body(begin, end, thread).
  void parallel(int items, const std::function<void(int, int, int)>& body);

 private:
  // Spins, then sleeps until a thread changes the value and notifies.
  //
  // A change must be sequentially consistent. The library looks for sleepers with such a
  // load, which would pass a release store that waits in the store buffer. A thread that
  // falls asleep meanwhile would see the old value and never wake.
  void wait_change(const std::atomic<uint32_t>& value, uint32_t old) const;
  void work(int thread);
  void stop();
  void keep_off_caller();

  const int threads_;
  // Rounds of a wait before the thread sleeps: none where there are more threads than
  // processors, since what it waits for needs one.
  const int spins_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* job_ = nullptr;
  FirstError* error_ = nullptr;
  std::atomic<bool> in_use_{false};
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<uint32_t> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  int caller_cpu_ = -1;
  bool stop_ = false;
  const int process_;  // that the workers live in
};

}  // namespace headrace
