// The thread pool by itself, for ThreadSanitizer (`make sanitize`): whatever its threads do, and whichever of them throw, each call ends
// with all work done once or with one of the exceptions, and the pool is there for the next.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pool.h"

using headrace::Deal;
using headrace::Pool;

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "pool_stress: %s\n", what);
  std::exit(1);
}

// Whether f throws the exception that says `message`.
bool throws(const std::string& message, auto&& f) {
  try {
    f();
  } catch (const std::runtime_error& error) {
    return message == error.what();
  }
  return false;
}

void check_parallel(Pool& pool, int items) {
  std::vector<int> times(static_cast<size_t>(items));  // plain ints: an item that two threads do is a race
  pool.parallel(items, [&](int begin, int end, int) {
    for (int i = begin; i < end; i++) times[static_cast<size_t>(i)]++;
  });
  expect(std::accumulate(times.begin(), times.end(), 0) == items, "an item was left out, or done twice");
}

// Regions with a barrier between them, as in a step: what one thread prepares in the barrier is there for all.
void check_barriers(Pool& pool, int regions) {
  Deal deal(pool.threads());
  std::vector<int> last(64, -1);
  int region = 0;
  deal.reset(static_cast<int>(last.size()));
  pool.run([&](int thread) {
    while (region < regions) {
      int begin, end;
      while (deal.next(thread, begin, end))
        for (int i = begin; i < end; i++) {
          expect(last[static_cast<size_t>(i)] == region - 1, "a region began before the last was done");
          last[static_cast<size_t>(i)] = region;
        }
      pool.barrier([&] {
        region++;
        deal.reset(static_cast<int>(last.size()));
      });
    }
  });
  expect(region == regions, "a region was not run");
}

// Threads of the mask throw; the caller is thread 0.
void check_exceptions(Pool& pool, unsigned mask) {
  const bool any = mask & ((1u << pool.threads()) - 1);
  const bool thrown = throws("thrown", [&] {
    pool.run([&](int thread) {
      if (mask >> thread & 1) throw std::runtime_error("thrown");
    });
  });
  expect(thrown == any, "an exception of a thread was lost, or came from nowhere");
}

// Two callers at a time: each call is done, or is refused; none waits for ever, and none spoils the other's.
void check_two_callers(Pool& pool) {
  if (pool.threads() == 1) return;
  const auto call = [&pool] {
    for (int i = 0; i < 50; i++) {
      std::array<int, 8> done{};
      try {
        pool.run([&](int thread) { done[static_cast<size_t>(thread)]++; });
        expect(std::accumulate(done.begin(), done.end(), 0) == pool.threads(), "a thread did not run");
      } catch (const std::runtime_error&) {
        expect(std::accumulate(done.begin(), done.end(), 0) == 0, "a call that was refused was run");
      }
    }
  };
  std::thread other(call);
  call();
  other.join();
}

}  // namespace

int main() {
  for (int threads = 1; threads <= 4; threads++) {
    Pool pool(threads);
    for (int round = 0; round < 20; round++) {
      for (const int items : {0, 1, 2, 7, 1000}) check_parallel(pool, items);
      for (unsigned mask = 0; mask < 16; mask++) check_exceptions(pool, mask);
      check_barriers(pool, 50);
      check_two_callers(pool);
      if (round % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the workers park
    }
  }
  for (int i = 0; i < 50; i++) check_parallel(*std::make_unique<Pool>(3), i);  // ends while its workers linger
  return 0;
}
