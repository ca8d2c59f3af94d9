// Kernels that pass over vectors once: displacement, difference, normalisation.
#include <cstring>

#include "reduce.h"

namespace ds_hessian {
namespace cpu {
namespace {

using lanes::add_product;
using lanes::D8;
using lanes::F8;
using lanes::Full;
using lanes::Streaming;
using lanes::widen;

// kMove: the weights become master + h v, else the master. kAlong: there is a v to project on.
template <bool kMove, bool kAlong, class W, class M>
void displace_tile(W* w, const M* m, const float* v, float h, int64_t begin, int64_t end,
                   D8* sums) {
  D8 along = sums[0], square = sums[1];
  lanes::each(begin, end, [&](int64_t i, auto io) {
    const D8 old = io.wide(w + i);
    F8 value = io.load(m + i);
    if (kMove) value = value + io.load(v + i) * h;
    const D8 change = io.store_wide(w + i, value) - old;
    if (kAlong) along = lanes::add_product(along, change, io.wide(v + i));
    square = lanes::add_product(square, change, change);
  });
  sums[0] = along;
  sums[1] = square;
}

// `v` begins with the first element of the shard.
template <bool kMove, bool kAlong, class W, class M>
void displace_range(const Shard& shard, const float* v, float h, int64_t begin, int64_t end,
                    int64_t owned, lanes::Sum* sums) {
  W* w = static_cast<W*>(shard.weight);
  const M* m = static_cast<const M*>(shard.master);
  parallel::reduce_range<2>(begin, end, owned, sums, [&](int64_t i, int64_t stop, D8* partial) {
    displace_tile<kMove, kAlong>(w, m, v, h, i, stop, partial);
  });
}

typedef void (*DisplaceRange)(const Shard&, const float*, float, int64_t, int64_t, int64_t,
                              lanes::Sum*);

template <bool kMove, bool kAlong, class W>
DisplaceRange pick_master(Dtype master) {
  switch (master) {
    case Dtype::kBFloat16:
      return displace_range<kMove, kAlong, W, bf16>;
    case Dtype::kFloat16:
      return displace_range<kMove, kAlong, W, fp16>;
    default:
      return displace_range<kMove, kAlong, W, float>;
  }
}

template <bool kMove, bool kAlong>
DisplaceRange pick(const Shard& shard) {
  switch (shard.weight_dtype) {
    case Dtype::kBFloat16:
      return pick_master<kMove, kAlong, bf16>(shard.master_dtype);
    case Dtype::kFloat16:
      return pick_master<kMove, kAlong, fp16>(shard.master_dtype);
    default:
      return pick_master<kMove, kAlong, float>(shard.master_dtype);
  }
}

DisplaceRange pick(const Shard& shard, bool move, bool along) {
  if (move) return pick<true, true>(shard);
  return along ? pick<false, true>(shard) : pick<false, false>(shard);
}

struct Task {  // a block of a shard
  size_t shard;
  int64_t offset;  // of the shard in the vector
  int64_t begin, end;
};

std::vector<Task> divide(const std::vector<Shard>& shards) {
  int64_t n = 0, offset = 0;
  for (const Shard& shard : shards) n += shard.length;
  const int64_t size = parallel::block_size(n);
  std::vector<Task> tasks;
  for (size_t i = 0; i < shards.size(); offset += shards[i++].length)
    for (int64_t begin = 0; begin < shards[i].length; begin += size)
      tasks.push_back({i, offset, begin, std::min(begin + size, shards[i].length)});
  return tasks;
}

}  // namespace

int64_t workspace_size(int64_t) { return 0; }

uint32_t required_features() {
  uint32_t features = 0;
#if defined(__AVX__)
  features |= 1;
#endif
#if defined(__AVX2__)
  features |= 2;
#endif
#if defined(__FMA__)
  features |= 4;
#endif
#if defined(__AVX512F__)
  features |= 8;
#endif
#if defined(__AVX512BW__) || defined(__AVX512DQ__) || defined(__AVX512VL__)
  features |= 16;
#endif
  return features;
}

void displace(const std::vector<Shard>& shards, const float* v, float h, int64_t owned, double* out,
              const Launch& launch) {
  const std::vector<Task> tasks = divide(shards);
  std::vector<double> partials(tasks.size() * 2);
  parallel::run(static_cast<int64_t>(tasks.size()), launch.threads, [&](int64_t number) {
    const Task& task = tasks[static_cast<size_t>(number)];
    const Shard& shard = shards[task.shard];
    const float* along = v ? v + task.offset : nullptr;
    lanes::Sum sums[2];
    pick(shard, h != 0, v != nullptr)(shard, along, h, task.begin, task.end, owned - task.offset,
                                      sums);
    partials[static_cast<size_t>(2 * number)] = sums[0].value();
    partials[static_cast<size_t>(2 * number + 1)] = sums[1].value();
  });
  parallel::collect(partials, 2, out);
}

namespace {

constexpr size_t kPairs = 4;  // pairs at a time: their sums stay in registers

// sums[p] += the product of pair p over a tile, for the first kCount pairs in one pass: memory is
// read without a pause, and a vector that several pairs share comes from the first-level cache.
template <size_t kCount>
void add_dots(const Pair* pairs, int64_t begin, int64_t end, lanes::Sum* sums) {
  const float *a[kCount], *b[kCount];
  D8 partial[kCount];
  for (size_t p = 0; p < kCount; ++p) {
    a[p] = pairs[p].a;
    b[p] = pairs[p].b;
    partial[p] = lanes::zeros();
  }
  lanes::each(begin, end, [&](int64_t i, auto io) {
    for (size_t p = 0; p < kCount; ++p)
      partial[p] = add_product(partial[p], io.wide(a[p] + i), io.wide(b[p] + i));
  });
  for (size_t p = 0; p < kCount; ++p) sums[p].add(partial[p].total());
}

typedef void (*AddDots)(const Pair*, int64_t, int64_t, lanes::Sum*);
constexpr AddDots kAddDots[kPairs] = {add_dots<1>, add_dots<2>, add_dots<3>, add_dots<4>};

}  // namespace

void dots(const std::vector<Pair>& pairs, int64_t owned, double* out, const Launch& launch) {
  const size_t count = pairs.size();
  std::vector<double> partials(static_cast<size_t>(parallel::block_count(owned)) * count);
  parallel::blocks(owned, launch.threads, [&](int64_t block, int64_t begin, int64_t end) {
    std::vector<lanes::Sum> sums(count);
    for (int64_t i = begin; i < end; i += parallel::kTile)
      for (size_t p = 0; p < count; p += kPairs)
        kAddDots[std::min(count - p, kPairs) - 1](&pairs[p], i, std::min(i + parallel::kTile, end),
                                                  &sums[p]);
    for (size_t p = 0; p < count; ++p)
      partials[static_cast<size_t>(block) * count + p] = sums[p].value();
  });
  parallel::collect(partials, static_cast<int64_t>(count), out);
}

namespace {

template <bool kZero>
void difference_of(float* plus, const float* minus, float scale, const float* zero, int64_t n,
                   int64_t owned, double* out, int threads) {
  parallel::reduce<2>(n, owned, threads, out, [=](int64_t begin, int64_t end, D8* sums) {
    D8 square = sums[0], second = sums[1];
    lanes::each(begin, end, [&](int64_t i, auto io) {
      const F8 a = io.load(plus + i), b = io.load(minus + i);
      const D8 p = io.store_wide(plus + i, (a - b) * scale);
      square = add_product(square, p, p);
      if (!kZero) return;
      const D8 z = io.wide(zero + i);
      const D8 s = widen(a) + widen(b) - (z + z);
      second = add_product(second, s, s);
    });
    sums[0] = square;
    sums[1] = second;
  });
}

}  // namespace

void difference(float* plus, const float* minus, float scale, const float* zero, int64_t n,
                int64_t owned, double* out, const Launch& launch) {
  const auto run = zero ? difference_of<true> : difference_of<false>;
  run(plus, minus, scale, zero, n, owned, out, launch.threads);
}

void curvature_ratio(const float* plus, const float* minus, const float* zero, int64_t owned,
                     double* out, const Launch& launch) {
  parallel::reduce<2>(owned, owned, launch.threads, out,
                      [=](int64_t begin, int64_t end, D8* out_sums) {
                        D8 first = out_sums[0], second = out_sums[1];
                        lanes::each(begin, end, [&](int64_t i, auto io) {
                          const D8 a = io.wide(plus + i), b = io.wide(minus + i);
                          const D8 z = io.wide(zero + i);
                          const D8 d = a - b, s = a + b - (z + z);
                          first = add_product(first, d, d);
                          second = add_product(second, s, s);
                        });
                        out_sums[0] = first;
                        out_sums[1] = second;
                      });
}

namespace {

template <class Whole, class Row>
void normalize_of(const float* w, float scale, float* v, Row* row, int64_t n, int64_t owned,
                  double* out, int threads) {
  parallel::reduce<1>(n, owned, threads, out, [=](int64_t begin, int64_t end, D8* out_sums) {
    D8 square = out_sums[0];
    lanes::each<Whole>(begin, end, [&](int64_t i, auto io) {
      F8 x = io.load(w + i) * scale;
      if (row) x = io.store(row + i, x);
      const D8 wide = widen(io.store(v + i, x));
      square = add_product(square, wide, wide);
    });
    out_sums[0] = square;
    if (std::is_same<Whole, Streaming>::value) parallel::fence();
  });
}

template <class Row>
void normalize_to(const float* w, float scale, float* v, Row* row, int64_t n, int64_t owned,
                  double* out, int threads) {
  // A tile cut at `owned` leaves the alignment of the rest to chance.
  const bool past_caches = v != w && owned % lanes::kLanes == 0 && parallel::streams(v, n) &&
                           (!row || parallel::streams(row, n * 4 / int64_t{sizeof(Row)}));
  const auto run = past_caches ? normalize_of<Streaming, Row> : normalize_of<Full, Row>;
  run(w, scale, v, row, n, owned, out, threads);
}

}  // namespace

void normalize_store(const float* w, float scale, float* v, void* row, Dtype row_dtype, int64_t n,
                     int64_t owned, double* out, const Launch& launch) {
  if (row_dtype == Dtype::kBFloat16)
    normalize_to(w, scale, v, static_cast<bf16*>(row), n, owned, out, launch.threads);
  else
    normalize_to(w, scale, v, static_cast<float*>(row), n, owned, out, launch.threads);
}

void copy(void* to, const void* from, int64_t bytes, const Launch& launch) {
  parallel::blocks(bytes, launch.threads, [&](int64_t, int64_t begin, int64_t end) {
    memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
           static_cast<size_t>(end - begin));
  });
}

}  // namespace cpu
}  // namespace ds_hessian
