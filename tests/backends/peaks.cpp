// Counts the memory that a process has allocated: preloaded (LD_PRELOAD) before libc, whose
// functions it calls. Where the kernel is asked instead, a peak is what a thread happens to see
// between two moments; here it is the highest sum there was.

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <malloc.h>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
}

namespace {

constexpr size_t kLeast = 1 << 14;  // bytes: smaller blocks are Python's objects

struct Sum {
  std::atomic<long> now{0}, peak{0}, before{0};

  void add(long bytes) {
    const long sum = now.fetch_add(bytes) + bytes;
    long seen = peak.load();
    while (seen < sum && !peak.compare_exchange_weak(seen, sum)) {
    }
  }
  void start() {
    before = now.load();
    peak = now.load();
  }
};

Sum memory;

long counted(void* block) {
  const size_t size = block ? malloc_usable_size(block) : 0;
  return size >= kLeast ? static_cast<long>(size) : 0;
}

void* taken(void* block) {
  if (const long size = counted(block)) memory.add(size);
  return block;
}

}  // namespace

extern "C" {

void* malloc(size_t size) noexcept { return taken(__libc_malloc(size)); }
void* calloc(size_t n, size_t size) noexcept { return taken(__libc_calloc(n, size)); }
void* memalign(size_t step, size_t size) noexcept { return taken(__libc_memalign(step, size)); }
void* aligned_alloc(size_t step, size_t size) noexcept { return memalign(step, size); }

int posix_memalign(void** block, size_t step, size_t size) noexcept {
  *block = memalign(step, size);
  return *block ? 0 : ENOMEM;
}

void* realloc(void* block, size_t size) noexcept {
  const long before = counted(block);
  void* moved = __libc_realloc(block, size);
  if (moved || size == 0) memory.add(counted(moved) - before);
  return moved;
}

void free(void* block) noexcept {
  if (const long size = counted(block)) memory.add(-size);
  __libc_free(block);
}

void peak_start() { memory.start(); }

long peak_bytes() { return memory.peak - memory.before; }

}  // extern "C"
