// What the bindings share.
#pragma once
#include <nanobind/nanobind.h>

#include <stdexcept>

namespace headrace {

class Plan;

// Limits that keep every product of sizes within an int.
constexpr int kMaxWidth = 1 << 24;

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// A plan that no other thread runs or changes, so that it may be looked into, and
// changed, for as long as Python's lock is held.
template <class P>
P& available(P& plan) {
  require(!plan.is_in_use(),
          "the plan is at work in another thread, and cannot be read or changed meanwhile");
  return plan;
}

void bind_plan(nanobind::module_& m);
void bind_gpu(nanobind::module_& m);
void bind_ops(nanobind::class_<Plan>& plan);
void bind_sampler(nanobind::module_& m);
void bind_strings(nanobind::module_& m);
void bind_suffix(nanobind::module_& m);
void bind_trie(nanobind::module_& m);
void bind_weights(nanobind::module_& m);

}  // namespace headrace
