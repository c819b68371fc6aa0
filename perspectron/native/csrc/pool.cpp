#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

namespace perspectron {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto SPIN = std::chrono::microseconds(50);
constexpr int MOST_WORKERS = 255;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Whether `ready()` came true before the time was up.
template <class Ready>
bool spin(Ready ready) {
  const auto end = Clock::now() + SPIN;
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      pause();
    }
  } while (Clock::now() < end);
  return ready();
}

// For what is a matter of microseconds unless a thread lost its core.
template <class Ready>
void await(Ready ready) {
  while (!spin(ready)) sched_yield();
}

struct Job {
  Job(int size, Body body, void* context) : team(size), body(body), context(context), working(size - 1) {}
  Team team;
  const Body body;
  void* const context;
  std::atomic<int> working;
};

class Worker {
 public:
  Worker() { std::thread(&Worker::loop, this).detach(); }

  void give(Job* job) {
    job_.store(job);
    if (asleep_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      pthread_cond_signal(&wake_);
    }
  }

 private:
  [[noreturn]] void loop() {
    for (;;) {
      Job* job = wait();
      job_.store(nullptr);
      job->body(job->context, job->team);
      job->working.fetch_sub(1, std::memory_order_release);  // the job may be gone after this
    }
  }

  Job* wait() {
    const auto given = [this] { return job_.load() != nullptr; };
    if (!spin(given)) {
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.store(true);
      while (!given()) pthread_cond_wait(&wake_, mutex_.native_handle());
      asleep_.store(false);
    }
    return job_.load();
  }

  alignas(64) std::atomic<Job*> job_{nullptr};
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;  // std's would ask for a C++ library of 2022
};

class Pool {
 public:
  bool take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void leave() { taken_.store(false, std::memory_order_release); }

  // How many workers there are, at most `wanted`: threads may be hard to get.
  int grow(int wanted) {
    try {
      while (int(workers_.size()) < wanted) workers_.push_back(std::make_unique<Worker>());
    } catch (const std::system_error&) {
    }
    return int(workers_.size()) < wanted ? int(workers_.size()) : wanted;
  }

  Worker& operator[](int i) { return *workers_[size_t(i)]; }

 private:
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<bool> taken_{false};
};

std::atomic<Pool*> pool{nullptr};
std::atomic<bool> forked{false};

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    pool.store(nullptr);
    forked.store(true);
  });
  (void)registered;
}

// The OpenMP that the process has loaded, found by name: this library is built and runs without one.
struct OpenMP {
  void (*const parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*const size)();  // of the team that the calling thread is in
  int (*const number)();
  int (*const most)();  // threads that this thread's next team would have: what torch.set_num_threads set

  bool has(int threads) const {
    return parallel && size && number && most && !forked.load(std::memory_order_relaxed) && most() == threads &&
           size() == 1;
  }
};

template <class F>
F symbol(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

const OpenMP& openmp() {
  static const OpenMP found{
      symbol<decltype(OpenMP::parallel)>("GOMP_parallel"), symbol<decltype(OpenMP::size)>("omp_get_num_threads"),
      symbol<decltype(OpenMP::number)>("omp_get_thread_num"), symbol<decltype(OpenMP::most)>("omp_get_max_threads")};
  return found;
}

struct Shared {  // a job for a team that OpenMP makes, whose size is known once it is there
  const Body body;
  void* const context;
  std::optional<Team> team;
  std::atomic<bool> ready{false};

  static void work(void* given) {
    Shared& job = *static_cast<Shared*>(given);
    if (openmp().number() == 0) {
      job.team.emplace(openmp().size());
      job.ready.store(true, std::memory_order_release);
    } else {
      await([&job] { return job.ready.load(std::memory_order_acquire); });
    }
    job.body(job.context, *job.team);
  }
};

Pool& the_pool() {
  Pool* found = pool.load(std::memory_order_acquire);
  if (found == nullptr) {
    Pool* made = new Pool;
    if (pool.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

void Team::barrier() {
  if (size_ == 1) return;
  const int phase = phase_.load(std::memory_order_relaxed);
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    missing_.store(size_, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  await([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
}

void run(int threads, Body body, void* context) {
  if (threads > 1) {
    watch_forks();
    Pool& mine = the_pool();
    if (mine.take()) {
      if (openmp().has(threads)) {
        Shared job{body, context, {}};
        openmp().parallel(Shared::work, &job, unsigned(threads), 0);
        mine.leave();
        return;
      }
      const int workers = mine.grow(threads - 1 < MOST_WORKERS ? threads - 1 : MOST_WORKERS);
      Job job(workers + 1, body, context);
      for (int i = 0; i < workers; i++) mine[i].give(&job);
      body(context, job.team);
      await([&job] { return job.working.load(std::memory_order_acquire) == 0; });
      mine.leave();
      return;
    }
  }
  Team alone(1);
  body(context, alone);
}

}  // namespace perspectron
