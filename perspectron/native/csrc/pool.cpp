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

// How the processor treats denormal numbers and rounds, which is each thread's own.
using Mode = uint64_t;
inline Mode mode() {
#if defined(__x86_64__)
  return __builtin_ia32_stmxcsr();
#elif defined(__aarch64__)
  uint64_t found;
  __asm__ volatile("mrs %0, fpcr" : "=r"(found));
  return found;
#else
  return 0;
#endif
}
inline void set_mode(Mode to) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(unsigned(to));
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(to));
#else
  (void)to;
#endif
}

struct Job {
  Job(int size, Body body, void* context) : team(size), body(body), context(context), working(size - 1) {}
  const Mode caller = mode();
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
      set_mode(job->caller);
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
std::atomic<bool> child{false};
const int registered = pthread_atfork(nullptr, nullptr, forked);

// The OpenMP that the process has loaded, found by name: this library is built and runs without one.
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*size)();  // of the team that the calling thread is in
  int (*number)();
  int (*most)();  // threads that this thread's next team would have: what torch.set_num_threads set

  bool has(int threads) const {
    return parallel != nullptr && !child.load(std::memory_order_relaxed) && most() >= threads && size() == 1;
  }
};

// Nothing, unless one library has all of it: two of them know nothing of each other's teams.
OpenMP find_openmp() {
  void *found[4], *library = nullptr;
  const char* names[] = {"GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num", "omp_get_max_threads"};
  for (int i = 0; i < 4; i++) {
    Dl_info about;
    found[i] = dlsym(RTLD_DEFAULT, names[i]);
    if (found[i] == nullptr || dladdr(found[i], &about) == 0) return {};
    if (i > 0 && about.dli_fbase != library) return {};
    library = about.dli_fbase;
  }
  return {reinterpret_cast<decltype(OpenMP::parallel)>(found[0]), reinterpret_cast<decltype(OpenMP::size)>(found[1]),
          reinterpret_cast<decltype(OpenMP::number)>(found[2]), reinterpret_cast<decltype(OpenMP::most)>(found[3])};
}

const OpenMP& openmp() {
  static const OpenMP found = find_openmp();
  return found;
}

struct Shared {  // a job for a team that OpenMP makes, whose size is known once it is there
  const Body body;
  void* const context;
  const Mode caller = mode();
  std::optional<Team> team = std::nullopt;
  std::atomic<bool> ready{false};

  static void work(void* given) {
    Shared& job = *static_cast<Shared*>(given);
    const Mode own = mode();
    set_mode(job.caller);
    if (openmp().number() == 0) {
      job.team.emplace(openmp().size());
      job.ready.store(true, std::memory_order_release);
    } else {
      await([&job] { return job.ready.load(std::memory_order_acquire); });
    }
    job.body(job.context, *job.team);
    set_mode(own);
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

void forked() {
  pool.store(nullptr);
  child.store(true);
}

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
    Pool& mine = the_pool();
    if (mine.take()) {
      if (openmp().has(threads)) {
        Shared job{body, context};
        openmp().parallel(Shared::work, &job, unsigned(openmp().most()), 0);
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
