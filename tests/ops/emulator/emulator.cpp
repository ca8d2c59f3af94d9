// The scheduler: fibers for the threads of a block, barriers, warp exchanges, shared memory, and
// what the sanitizers must be told. Never instrumented by ThreadSanitizer itself.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "shim/cuda_runtime.h"

#ifdef CUDASIM_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef CUDASIM_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
#endif

// Saves the callee-saved registers on the stack, its pointer in *from, and continues at `to`.
extern "C" void cudasim_switch(void** from, void* to);
#if !defined(__x86_64__)
#error "port cudasim_switch: twenty lines for each processor, or ucontext"
#endif
asm(R"(
.text
.type cudasim_switch,@function
cudasim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cudasim_switch,.-cudasim_switch
)");

extern "C" {
long cudasim_launches = 0;  // of kernels, for tests that count them
}

namespace cudasim {
dim3 thread_index, block_index, block_size, grid_size;

namespace {
constexpr size_t kStack = 128 << 10;
constexpr size_t kArena = 256 << 10;  // static and dynamic shared memory of a block, with gaps

enum class State { kReady, kBarrier, kWarp, kDone };

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  int group;
};

struct Fiber {
  void* sp = nullptr;
  State state = State::kDone;
  Site site{};
  unsigned mask = 0;
  int turn = 0;  // parity of the warp's exchanges: two buffers, so that none is overwritten unread
  int group = 0;
  std::vector<Copy> copies;
  int slot = 0;  // its stack, and its logical thread for ThreadSanitizer
  bool started = false;
  void* asan = nullptr;
};

struct Block {
  Thunk thunk;
  const void* closure;
  std::vector<Fiber> fibers;
  std::vector<uint64_t> bits[2];
  char* stacks = nullptr;
  char* arena = nullptr;
  size_t used = 0, counted = 0, dynamic = 0;
  std::map<const void*, void*> variables;
  char sync = 0;  // address of the barrier's happens-before
};

Block* block;
int current;
void* main_sp;
[[maybe_unused]] void* main_tsan;
[[maybe_unused]] char grid_sync;
[[maybe_unused]] void* tsan_threads[1024];  // made once: making one takes milliseconds
std::string error;
thread_local cudaError_t last = cudaSuccess;
thread_local size_t opted_in = 0;
[[maybe_unused]] const void* main_bottom;
[[maybe_unused]] size_t main_size;

int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

std::string at(Site s) { return std::string(s.file) + ":" + std::to_string(s.line); }

void yield() {  // from a fiber to the scheduler
  Fiber& f = block->fibers[current];
#ifdef CUDASIM_TSAN
  __tsan_switch_to_fiber(main_tsan, 1);  // 1: no happens-before by the switch
#endif
#ifdef CUDASIM_ASAN
  __sanitizer_start_switch_fiber(f.state == State::kDone ? nullptr : &f.asan, main_bottom,
                                 main_size);
#endif
  cudasim_switch(&f.sp, main_sp);
#ifdef CUDASIM_ASAN
  __sanitizer_finish_switch_fiber(block->fibers[current].asan, nullptr, nullptr);
#endif
}

void resume(int t) {  // from the scheduler to a fiber
  current = t;
  thread_index =
      dim3(t % block_size.x, t / block_size.x % block_size.y, t / (block_size.x * block_size.y));
  Fiber& f = block->fibers[t];
#ifdef CUDASIM_TSAN
  __tsan_switch_to_fiber(tsan_threads[f.slot], f.started ? 1 : 0);  // 0: after the launch
  f.started = true;
#endif
#ifdef CUDASIM_ASAN
  void* mine;
  __sanitizer_start_switch_fiber(&mine, block->stacks + f.slot * kStack, kStack);
#endif
  cudasim_switch(&main_sp, f.sp);
#ifdef CUDASIM_ASAN
  __sanitizer_finish_switch_fiber(mine, nullptr, nullptr);
#endif
}

void entry() {
#ifdef CUDASIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
  block->thunk(block->closure);
  if (!block->fibers[current].copies.empty()) error = "a thread ends with a copy not waited for";
#ifdef CUDASIM_TSAN
  __tsan_release(&grid_sync);
#endif
  block->fibers[current].state = State::kDone;
  yield();
  abort();
}

// A warp whose lanes have all come to an exchange goes on.
bool release_warp(size_t first) {
  auto& fibers = block->fibers;
  for (size_t t = first; t < std::min(first + 32, fibers.size()); ++t) {
    if (fibers[t].state != State::kWarp) continue;
    const unsigned mask = fibers[t].mask;
    bool all = true;
    for (size_t lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      const size_t other = first + lane;
      if (other >= fibers.size() || fibers[other].state == State::kDone) {
        error = "a lane of the mask does not exist or has left, at " + at(fibers[t].site);
        return false;
      }
      const Fiber& f = fibers[other];
      all = all && f.state == State::kWarp && f.mask == mask && f.site.line == fibers[t].site.line;
    }
    if (!all) continue;
    for (size_t lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) fibers[first + lane].state = State::kReady;
    return true;
  }
  return false;
}

bool release_block() {
  const Fiber* first = nullptr;
  bool left = false;
  for (Fiber& f : block->fibers) {
    if (f.state == State::kDone) left = true;
    if (f.state == State::kWarp) {
      error = "deadlock: a lane waits for its warp at " + at(f.site);
      return false;
    }
    if (f.state != State::kBarrier) continue;
    if (first && first->site.line != f.site.line) {
      error = "divergent barriers at " + at(first->site) + " and " + at(f.site);
      return false;
    }
    first = &f;
  }
  if (left) {
    error = "some threads have left, others wait at the barrier " + at(first->site);
    return false;
  }
  for (Fiber& f : block->fibers) f.state = State::kReady;
  return true;
}

void schedule(std::mt19937& random, int order) {
  auto& fibers = block->fibers;
  std::vector<int> queue(fibers.size());
  std::iota(queue.begin(), queue.end(), 0);
  if (order == 1) std::reverse(queue.begin(), queue.end());
  for (;;) {
    if (order == 2) std::shuffle(queue.begin(), queue.end(), random);
    bool ran = false, live = false;
    for (int t : queue) {
      if (fibers[t].state == State::kReady) {
        resume(t);
        ran = true;
        if (!error.empty()) return;
      }
      live = live || fibers[t].state != State::kDone;
    }
    if (!live) return;
    for (size_t first = 0; first < fibers.size(); first += 32)
      while (error.empty() && release_warp(first)) ran = true;
    if (!error.empty()) return;
    if (!ran && !release_block()) return;
  }
}

void* take(size_t bytes, size_t alignment) {  // of shared memory, with a gap on either side
  Block& b = *block;
  b.used = (b.used + 64 + alignment - 1) / alignment * alignment;
  void* p = b.arena + b.used;
  b.used += bytes;
  b.counted += bytes;
  if (b.used + 64 > kArena) fail("too much shared memory", CUDASIM_SITE);
#ifdef CUDASIM_ASAN
  __asan_unpoison_memory_region(p, bytes);
#endif
  return p;
}

void* fresh(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::runtime_error("cudasim: mmap");
  return p;
}
}  // namespace

void fail(const char* what, Site site) {
  error = std::string(what) + " at " + at(site);
  yield();
  abort();
}

void barrier(Site site) {
  Fiber& f = block->fibers[current];
#ifdef CUDASIM_TSAN
  __tsan_release(&block->sync);
#endif
  f.state = State::kBarrier;
  f.site = site;
  yield();
#ifdef CUDASIM_TSAN
  __tsan_acquire(&block->sync);
#endif
}

uint64_t exchange(unsigned mask, uint64_t bits, int source, Site site) {
  Fiber& f = block->fibers[current];
  const int me = current, first = me / 32 * 32, turn = f.turn ^= 1;
  if (!(mask >> (me - first) & 1)) fail("the mask lacks the calling lane", site);
  block->bits[turn][me] = bits;
  f.state = State::kWarp;
  f.mask = mask;
  f.site = site;
  yield();
  if (source < 0 || source >= 32) return bits;
  if (!(mask >> source & 1)) return 0xFFF8DEADFFF8DEADull;  // undefined by CUDA: a NaN
  return block->bits[turn][first + source];
}

void* shared_static(const void* tag, size_t bytes, size_t alignment) {
  void*& p = block->variables[tag];
  if (!p) p = take(bytes, alignment);
  return p;
}

void* shared_dynamic() { return block->arena + 64; }

void async_copy(void* to, const void* from, size_t bytes) {
  Fiber& f = block->fibers[current];
  f.copies.push_back({to, from, bytes, f.group});
}
void async_commit() { ++block->fibers[current].group; }
void copy_bytes(void* to, const void* from, size_t bytes);  // instrumented: copies.cpp
void async_wait(int left) {
  Fiber& f = block->fibers[current];
  std::vector<Copy> later;
  for (const Copy& c : f.copies) {
    if (c.group < f.group - left)
      copy_bytes(c.to, c.from, c.bytes);
    else
      later.push_back(c);
  }
  f.copies.swap(later);
}

void run_grid(dim3 grid, dim3 size, size_t dynamic, Thunk thunk, const void* closure, Site site) {
  const size_t threads = static_cast<size_t>(size.x) * size.y * size.z;
  const size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
  const size_t allowed = std::max<size_t>(48 << 10, opted_in);  // by this thread's last opt-in
  opted_in = 0;
  if (threads == 0 || threads > 1024 || blocks == 0 || grid.x > 0x7FFFFFFFu || dynamic > allowed ||
      dynamic > static_cast<size_t>(setting("CUDASIM_SHARED_BLOCK", 232448))) {
    last = cudaErrorInvalidConfiguration;
    return;
  }
  static std::mutex one_at_a_time;  // Python threads may call at once; the scheduler is global
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  static std::mt19937 random(setting("CUDASIM_SEED", 1));
  const int order = setting("CUDASIM_ORDER", 0);  // 0: forward, 1: backward, 2: at random
  ++cudasim_launches;
  block_size = size;
  grid_size = grid;
  error.clear();
#ifdef CUDASIM_TSAN
  main_tsan = __tsan_get_current_fiber();
#endif
  for (size_t n = 0; n < blocks && error.empty(); ++n) {
    const size_t b = order == 1 ? blocks - 1 - n : n;
    block_index = dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
    Block here{};
    block = &here;
    here.thunk = thunk;
    here.closure = closure;
    static char* const stacks = static_cast<char*>(fresh(1024 * kStack));
    here.stacks = stacks;
    here.arena = static_cast<char*>(fresh(kArena));
    memset(here.arena, 0xFF, kArena);  // uninitialised shared memory reads as NaN
#ifdef CUDASIM_ASAN
    __asan_poison_memory_region(here.arena, kArena);
    __asan_unpoison_memory_region(here.arena + 64, dynamic);
#endif
    here.used = 64 + dynamic;
    here.counted = dynamic;
    here.fibers.resize(threads);
    here.bits[0].resize(threads);
    here.bits[1].resize(threads);
    for (size_t t = 0; t < threads; ++t) {
      Fiber& f = here.fibers[t];
      f.state = State::kReady;
      // Thread t of different blocks is not one logical thread: races between blocks show.
      f.slot = static_cast<int>((t + 37 * n) % threads);
      void** top =
          reinterpret_cast<void**>(here.stacks + (f.slot + 1) * kStack) - 3;  // ABI: 8 mod 16
      *top = nullptr;                            // entry() never returns
      *--top = reinterpret_cast<void*>(&entry);  // what cudasim_switch returns to
      f.sp = top - 6;                            // six registers
#ifdef CUDASIM_TSAN
      if (!tsan_threads[f.slot]) tsan_threads[f.slot] = __tsan_create_fiber(0);
#endif
    }
    schedule(random, order);
    if (here.counted > static_cast<size_t>(setting("CUDASIM_SHARED_BLOCK", 232448)))
      error = "static and dynamic shared memory exceed the device's";
#ifdef CUDASIM_ASAN
    __asan_unpoison_memory_region(here.arena, kArena);
    __asan_unpoison_memory_region(here.stacks, 1024 * kStack);
#endif
    munmap(here.arena, kArena);
    block = nullptr;
  }
#ifdef CUDASIM_TSAN
  __tsan_acquire(&grid_sync);
#endif
  if (!error.empty())
    throw std::runtime_error("cudasim: " + error + " (kernel launched at " + at(site) + ")");
}

cudaError_t set_dynamic_shared(int bytes) {
  if (bytes > setting("CUDASIM_SHARED_BLOCK", 232448)) return cudaErrorInvalidValue;
  opted_in = static_cast<size_t>(bytes);
  return cudaSuccess;
}

int occupancy(int threads, size_t dynamic) {
  const size_t shared = setting("CUDASIM_SHARED_SM", 233472);
  return static_cast<int>(std::min<size_t>(2048 / threads, shared / (dynamic + 1024 + 256)));
}
}  // namespace cudasim

const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                 : "invalid value";
}
cudaError_t cudaGetLastError() {
  const cudaError_t status = cudasim::last;
  cudasim::last = cudaSuccess;
  return status;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? cudasim::setting("CUDASIM_SMS", 2)
           : which == cudaDevAttrMaxSharedMemoryPerMultiprocessor
               ? cudasim::setting("CUDASIM_SHARED_SM", 233472)
               : cudasim::setting("CUDASIM_SHARED_BLOCK", 232448);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (bytes) memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  if (bytes) memcpy(to, from, bytes);
  return cudaSuccess;
}
