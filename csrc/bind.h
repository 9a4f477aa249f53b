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

// A plan that may be changed: one that runs no step in another thread.
template <class P>
P& changeable(P& plan) {
  require(!plan.is_running(), "the plan is running a step, and cannot be changed meanwhile");
  return plan;
}

void bind_plan(nanobind::module_& m);
void bind_ops(nanobind::class_<Plan>& plan);
void bind_sampler(nanobind::module_& m);

}  // namespace headrace
