// A pool of threads that wait for work: spinning for a while, then asleep.
//
// One caller at a time has the workers; another that comes meanwhile runs alone. After fork() the child starts a
// pool of its own. The pool is never destroyed: at exit its threads sleep or end with the process.
#pragma once
#include <atomic>
#include <cstdint>

namespace perspectron {

class Team {  // the threads that run one piece of work together
 public:
  explicit Team(int size) : size(size), missing_(size) {}
  const int size;
  void barrier();

 private:
  std::atomic<int> missing_;
  std::atomic<int> phase_{0};
};

class Claims {  // deals out [0, total) in pieces of `grain`
 public:
  Claims(int64_t total, int64_t grain) : total_(total), grain_(grain) {}
  bool next(int64_t& first, int64_t& last) {
    first = next_.fetch_add(grain_, std::memory_order_relaxed);
    last = first + grain_ < total_ ? first + grain_ : total_;
    return first < total_;
  }

 private:
  const int64_t total_, grain_;
  std::atomic<int64_t> next_{0};
};

using Body = void (*)(void* context, Team& team);
void run(int threads, Body body, void* context);

// Calls f(team) on up to `threads` threads, this one among them, and returns when all are done.
template <class F>
void parallel(int threads, F&& f) {
  run(threads, [](void* context, Team& team) { (*static_cast<F*>(context))(team); }, &f);
}

}  // namespace perspectron
