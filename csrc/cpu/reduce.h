// Sums over the owned prefix of a vector, block by block, in an order fixed by its length.
#pragma once

#include <vector>

#include "lanes.h"
#include "parallel.h"

namespace ds_hessian {
namespace parallel {

// Runs tile(begin, end, sums) over [begin, end) in tiles that lie on one side of `owned`, and adds
// up the S sums of those that are owned. Tiles count from `begin`.
template <int S, class Tile>
void reduce_range(int64_t begin, int64_t end, int64_t owned, lanes::Sum* sums, const Tile& tile) {
  for (int64_t i = begin, stop; i < end; i = stop) {
    stop = std::min(i + kTile, end);
    if (i < owned && owned < stop) stop = owned;
    lanes::D8 partial[S];
    for (int s = 0; s < S; ++s) partial[s] = lanes::zeros();
    tile(i, stop, partial);
    if (i >= owned) continue;
    for (int s = 0; s < S; ++s) sums[s].add(partial[s].total());
  }
}

// out[s] = the sum of partials[task * count + s] over all tasks, in order.
inline void collect(const std::vector<double>& partials, int64_t count, double* out) {
  for (int64_t s = 0; s < count; ++s) {
    lanes::Sum sum;
    for (size_t i = static_cast<size_t>(s); i < partials.size(); i += static_cast<size_t>(count))
      sum.add(partials[i]);
    out[s] = sum.value();
  }
}

// Runs tile(begin, end, sums) over [0, n) on all threads; out receives the S sums.
template <int S, class Tile>
void reduce(int64_t n, int64_t owned, int threads, double* out, const Tile& tile) {
  std::vector<double> partials(static_cast<size_t>(block_count(n) * S));
  blocks(n, threads, [&](int64_t block, int64_t begin, int64_t end) {
    lanes::Sum sums[S];
    reduce_range<S>(begin, end, owned, sums, tile);
    for (int s = 0; s < S; ++s) partials[static_cast<size_t>(block * S + s)] = sums[s].value();
  });
  collect(partials, S, out);
}

// A vector of this many bytes does not stay in the caches of one processor: what is written past
// them is not missed, and saves reading the line first.
constexpr int64_t kStreamingBytes = int64_t{16} << 20;

template <class T>
bool streams(const T* to, int64_t n) {
  return n * static_cast<int64_t>(sizeof(T)) >= kStreamingBytes &&
         reinterpret_cast<uintptr_t>(to) % (lanes::kLanes * sizeof(T)) == 0;
}

// Orders streaming stores before whatever the caller does next.
inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace parallel
}  // namespace ds_hessian
