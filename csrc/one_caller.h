// What only one thread at a time may use.
#pragma once
#include <atomic>
#include <stdexcept>

namespace headrace {

// A second caller gets an error, at once: nothing here waits.
class OneCaller {
 public:
  // Held by the caller for as long as it uses the thing. Throws std::runtime_error if
  // another one does.
  class Turn {
   public:
    Turn(OneCaller& of, const char* message) : of_(of) {
      if (of.taken_.exchange(true, std::memory_order_acquire)) throw std::runtime_error(message);
    }
    ~Turn() { of_.taken_.store(false, std::memory_order_release); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    OneCaller& of_;
  };

  OneCaller() = default;
  OneCaller(const OneCaller&) {}  // the copy has no caller yet
  OneCaller& operator=(const OneCaller&) = delete;

  bool is_taken() const { return taken_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> taken_{false};
};

}  // namespace headrace
