// A pool of threads, and the division of a vector into blocks that does not depend on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

namespace ds_hessian {
namespace parallel {

// Runs body(task) for every task in [0, tasks) on up to `threads` threads, this one included.
// The order is unspecified: each task writes results of its own.
void run(int64_t tasks, int threads, const std::function<void(int64_t)>& body);

constexpr int64_t kTile = 4096;       // elements between two compensated additions
constexpr int64_t kMinBlock = 32768;  // below, starting a task costs more than its work
constexpr int64_t kMaxBlocks = 1024;  // bounds the memory of partial sums

// Elements of a block: a function of the length alone, or the sums would depend on the threads.
inline int64_t block_size(int64_t n) {
  const int64_t even = (n + kMaxBlocks - 1) / kMaxBlocks;
  return std::max(kMinBlock, (even + kTile - 1) / kTile * kTile);
}

inline int64_t block_count(int64_t n) { return (n + block_size(n) - 1) / block_size(n); }

// Runs body(block, begin, end) for the blocks of [0, n).
template <class Body>
void blocks(int64_t n, int threads, const Body& body) {
  const int64_t size = block_size(n);
  run(block_count(n), threads,
      [&](int64_t block) { body(block, block * size, std::min(n, (block + 1) * size)); });
}

}  // namespace parallel
}  // namespace ds_hessian
