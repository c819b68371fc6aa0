// Threads that work together: those of the process's OpenMP, or a pool of our own.
//
// PyTorch's own operations run on OpenMP's threads, which spin for milliseconds after each. A second pool would be kept
// from its core by them, and keep them from theirs, so ours is for more threads than OpenMP has, for processes without
// it, and for children of fork(), where it does not work. OpenMP's team is always whole: one of another size would be made
// anew each time. Our pool's threads spin for a while, then sleep; it is
// never destroyed: at exit its threads sleep or end with the process. One caller at a time has the workers; another that
// comes meanwhile runs alone.
#pragma once
#include <atomic>
#include <cstdint>

namespace perspectron {

class Team {  // the threads that run one piece of work together
 public:
  explicit Team(int size) : missing_(size), size_(size) {}
  void barrier();

 private:
  std::atomic<int> missing_;
  std::atomic<int> phase_{0};
  const int size_;
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

void forked();  // tells a child that it is one, where fork() came before the library was loaded

using Body = void (*)(void* context, Team& team);
void run(int threads, Body body, void* context);

// Calls f(team) on some threads, this one among them, and returns when all are done: on one if `threads` is 1, on all of
// OpenMP's if that has as many, else on `threads` of our own or, where others are at work, fewer. They count small numbers
// as this one does.
template <class F>
void parallel(int threads, F&& f) {
  run(threads, [](void* context, Team& team) { (*static_cast<F*>(context))(team); }, &f);
}

}  // namespace perspectron
