#include "hardware.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "memory.h"
#include "pool.h"
#include "processor.h"

namespace headrace {
namespace {

double seconds_of(const auto& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The kernels that this build has and this processor can run, best last.
std::vector<const Kernels*> available() {
  std::vector<const Kernels*> tables;
  for (const std::string& isa : processor_isas()) {
    if (isa == "portable") tables.push_back(kernels_portable());
#ifdef HEADRACE_ISA_avx2
    if (isa == "avx2") tables.push_back(kernels_avx2());
#endif
#ifdef HEADRACE_ISA_avx512
    if (isa == "avx512") tables.push_back(kernels_avx512());
#endif
#ifdef HEADRACE_ISA_avx512bf16
    if (isa == "avx512bf16") tables.push_back(kernels_avx512bf16());
#endif
#ifdef HEADRACE_ISA_neon
    if (isa == "neon") tables.push_back(kernels_neon());
#endif
  }
  return tables;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* k : available()) names.emplace_back(k->name);
  return names;
}

const Kernels* kernels_for(const std::string& isa) {
  const auto tables = available();
  if (isa.empty()) return tables.back();
  std::string names;
  for (const Kernels* k : tables) {
    if (isa == k->name) return k;
    names += std::string(names.empty() ? "" : ", ") + k->name;
  }
  throw std::invalid_argument("this machine has no instruction set '" + isa +
                              "'; there are: " + names);
}

double read_bandwidth(int threads, size_t bytes) {
  Pool pool(threads);
  const size_t share = bytes / pool.threads() / 4096 * 4096;
  if (share == 0)
    throw std::invalid_argument("a measurement of bandwidth needs 4,096 bytes for each thread");
  check_fits_memory(bytes);
  Arena arena(bytes);
  pool.run([&](int t) { std::memset(arena.data() + t * share, 1, share); });
  // The median: on a shared machine the best of a few passes is a burst that no step
  // can count on.
  std::vector<double> seconds;
  for (int pass = 0; pass < 15; pass++)
    seconds.push_back(seconds_of([&] {
      pool.run([&](int t) {
        const auto* p = reinterpret_cast<const uint64_t*>(arena.data() + t * share);
        uint64_t sums[8] = {};
        for (size_t i = 0; i < share / 8; i += 8)
          for (int j = 0; j < 8; j++) sums[j] ^= p[i + j];
        [[maybe_unused]] static volatile uint64_t sink = 0;  // keeps the loop alive
        for (const uint64_t s : sums) sink = s;
      });
    }));
  std::nth_element(seconds.begin(), seconds.begin() + 7, seconds.end());
  return static_cast<double>(share) * pool.threads() / seconds[7];
}

double dot_rate(const std::string& kind, int threads) {
  const char* const kinds[] = {"int8", "bf16", "f32"};
  const auto k = std::find(std::begin(kinds), std::end(kinds), kind) - std::begin(kinds);
  if (k == 3) throw std::invalid_argument("kind is int8, bf16 or f32");
  Pool pool(threads);
  const Kernels* kernels = kernels_for("");
  const int64_t iterations = 1 << 20;
  double best = 0;
  for (int pass = 0; pass < 10; pass++) {
    std::vector<double> done(pool.threads());
    const double seconds = seconds_of([&] {
      pool.run([&](int t) { done[t] = kernels->dot_rate(static_cast<int>(k), iterations); });
    });
    double total = 0;
    for (const double d : done) total += d;
    best = std::max(best, 2 * total / seconds);
  }
  return best;
}

}  // namespace headrace
