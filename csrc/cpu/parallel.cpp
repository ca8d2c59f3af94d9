#include "parallel.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ds_hessian {
namespace parallel {
namespace {

// One call's tasks: each thread has a contiguous range, so that it mostly touches the memory that
// it touched in the last call, and takes from the others' ranges when its own is done.
class Job {
 public:
  Job(int64_t tasks, int threads, const std::function<void(int64_t)>& body)
      : tasks_(tasks), threads_(threads), body_(body), next_(new Counter[threads]) {
    for (int i = 0; i < threads; ++i) next_[i].value = bound(i);
  }

  void work(int thread) {
    for (int turn = 0; turn < threads_; ++turn) {
      const int range = (thread + turn) % threads_;
      for (;;) {
        const int64_t task = next_[range].value.fetch_add(1, std::memory_order_relaxed);
        if (task >= bound(range + 1)) break;
        body_(task);
      }
    }
  }

 private:
  struct alignas(64) Counter {  // a cache line each
    std::atomic<int64_t> value{0};
  };

  int64_t bound(int range) const {
    return tasks_ / threads_ * range + std::min<int64_t>(range, tasks_ % threads_);
  }

  const int64_t tasks_;
  const int threads_;
  const std::function<void(int64_t)>& body_;
  std::unique_ptr<Counter[]> next_;
};

class Pool {
 public:
  const pid_t owner = getpid();
  std::mutex busy;  // held for the length of a call

  void run(Job& job, int threads) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (static_cast<int>(workers_) < threads - 1) start_worker();
    job_ = &job;
    wanted_ = threads - 1;
    running_ = threads - 1;
    ++call_;
    wake_.notify_all();
    lock.unlock();
    job.work(0);
    lock.lock();
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }

 private:
  void start_worker() {
    const int number = ++workers_;
    const int64_t seen = call_;
    std::thread([this, number, seen] { serve(number, seen); }).detach();
  }

  void serve(int number, int64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return call_ != seen; });
      seen = call_;
      if (number > wanted_) continue;
      Job* job = job_;
      lock.unlock();
      job->work(number);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int wanted_ = 0, running_ = 0, workers_ = 0;
  int64_t call_ = 0;
};

std::atomic<Pool*> current{nullptr};

// The pool of this process. Never destroyed: its threads may outlive static destructors, and after
// a fork the child has none of them, so it makes a pool of its own.
Pool& pool() {
  Pool* found = current.load();
  while (found == nullptr || found->owner != getpid()) {
    Pool* made = new Pool;
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

void run(int64_t tasks, int threads, const std::function<void(int64_t)>& body) {
  const int used = static_cast<int>(std::min<int64_t>(tasks, threads));
  if (used > 1) {
    Pool& shared = pool();
    std::unique_lock<std::mutex> free(shared.busy, std::try_to_lock);
    if (free.owns_lock()) {
      Job job(tasks, used, body);
      shared.run(job, used);
      return;
    }  // another Python thread has the pool: do the work here
  }
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

}  // namespace parallel
}  // namespace ds_hessian
