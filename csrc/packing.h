// Matrices that wait to be packed, and the thread that packs them while their owner goes on.
#pragma once
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pool.h"
#include "weights.h"

namespace headrace {

class Packing {
 public:
  struct Matrix {
    Stored stored;
    Weight weight;
    int number = 0;       // in its plan
    bool mapped = false;  // the codes are pages of a file, which are given back afterwards
    std::shared_ptr<void> keeps = {};  // what `stored` points into
  };

  explicit Packing(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  ~Packing();
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;

  // Takes a matrix that has been checked. Waits for the thread, if it is at work.
  void add(Matrix matrix);
  // Packs all matrices on the pool, in a thread. The pool belongs to it meanwhile.
  void start();
  // Waits for so many milliseconds at most; packs what was not started. Returns whether all
  // matrices are packed, or throws what the thread threw.
  bool wait_for(int milliseconds);
  void wait();
  // Waits for the thread, if it is at work: the pool is free then.
  void join() {
    if (thread_) wait();
  }
  // The first matrix whose pages could not be read; -1: all could be.
  int unreadable() const { return unreadable_; }

 private:
  struct Piece {
    size_t matrix;
    int begin, end;  // tiles
  };
  void pack();
  void pack(const Piece& piece);
  void finish();

  std::shared_ptr<Pool> pool_;
  std::vector<Matrix> matrices_;
  std::vector<Piece> pieces_;
  std::vector<std::atomic<int>> left_;  // pieces of each matrix
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> unreadable_{-1};
  std::exception_ptr error_;
  std::unique_ptr<std::thread> thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

}  // namespace headrace
