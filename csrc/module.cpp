// The extension module: each part of csrc binds itself.
#include "bind.h"

NB_MODULE(_native, m) {
  headrace::bind_plan(m);
  headrace::bind_sampler(m);
}
