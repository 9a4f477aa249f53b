// The extension module: each part of csrc binds itself.
#include <nanobind/nanobind.h>

namespace headrace {
void bind_plan(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
}  // namespace headrace

NB_MODULE(_native, m) {
  headrace::bind_plan(m);
  headrace::bind_sampler(m);
}
