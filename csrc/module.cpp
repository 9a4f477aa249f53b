// The extension module: each part of csrc binds itself.
#include "bind.h"
#if defined(__linux__)
#include <pthread.h>
#endif

NB_MODULE(_native, m) {
#if defined(__linux__)
  // What the lost threads of a forked process held stays where it is, and is nothing to
  // warn of when the process ends.
  pthread_atfork(nullptr, nullptr, [] { nanobind::set_leak_warnings(false); });
#endif
  headrace::bind_weights(m);
  headrace::bind_plan(m);
  headrace::bind_sampler(m);
  headrace::bind_strings(m);
  headrace::bind_suffix(m);
  headrace::bind_trie(m);
  headrace::bind_gpu(m);
}
