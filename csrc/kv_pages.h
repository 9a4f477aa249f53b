// KV memory that is made resident before its blocks are used.
//
// The first write of a huge page takes 0.1 ms, and 5 ms in a virtual machine that had no
// memory for it yet. Within a step all threads would wait for the one that writes. So a
// thread that runs on idle processors only stays some pages ahead of the blocks in use,
// and memory still grows with the requests.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace headrace {

// Bytes that are resident ahead of those in use, of so many in all.
size_t kv_bytes_ahead(size_t bytes);

class KvPages {
 public:
  // `data` begins on a huge page.
  KvPages(uint8_t* data, size_t bytes);
  ~KvPages();
  KvPages(const KvPages&) = delete;
  KvPages& operator=(const KvPages&) = delete;

  // Says that the first `bytes` are in use. The thread starts with the first call.
  void use(size_t bytes);

 private:
  void work();

  uint8_t* const data_;
  const size_t bytes_, ahead_;
  const pid_t process_;  // that the thread lives in
  std::atomic<size_t> used_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace headrace
