// Kernels that pass over vectors once: displacement, difference, Lanczos update, normalisation.
#include <type_traits>

#include "common.cuh"

namespace ds_hessian {
namespace cuda {
namespace {

// A product of two widened fp32 values is exact, so that contracting it changes nothing.
__device__ __forceinline__ void add_product(double& sum, double a, double b) {
  sum = fma(a, b, sum);
}

constexpr int kShardsPerLaunch = 64;  // their table travels in the kernel's arguments

struct Piece {
  void* weight;
  const void* master;
  int64_t offset;  // of the shard in the vector
  Division division;
};

struct Pieces {
  Piece pieces[kShardsPerLaunch];
  int count;
};
static_assert(sizeof(Pieces) <= 3840, "kernel arguments are limited to 4 KB");

// random[j] = the random bits of the element with global index `index` + j, in the lower half. One
// Philox block serves eight elements, so that kVector of them take two where they straddle.
template <int kCount>
__device__ __forceinline__ void draw(uint64_t seed, int64_t index, uint32_t (&random)[kCount]) {
  const uint64_t block = static_cast<uint64_t>(index >> 3);
  const int inside = static_cast<int>(index & 7);
  const probe::Words first = probe::philox(seed, 0, block);
  uint32_t words[8] = {first.x0, first.x1, first.x2, first.x3};
  if (inside + kCount > 8) {
    const probe::Words second = probe::philox(seed, 0, block + 1);
    words[4] = second.x0;
    words[5] = second.x1;
    words[6] = second.x2;
    words[7] = second.x3;
  }
  // Shifts by `inside` halves, in steps that leave the words in registers.
  if (inside & 4)
#pragma unroll
    for (int k = 0; k < 6; ++k) words[k] = words[k + 2];
  if (inside & 2)
#pragma unroll
    for (int k = 0; k < 7; ++k) words[k] = words[k + 1];
  if (inside & 1)
#pragma unroll
    for (int k = 0; k < 7; ++k) words[k] = __funnelshift_r(words[k], words[k + 1], 16);
#pragma unroll
  for (int j = 0; j < kCount; ++j) random[j] = words[j / 2] >> 16 * (j % 2);
}

template <Rounding kRounding, class W, class M>
struct Displace {
  const float* v;
  float h;
  int64_t owned;
  uint64_t seed;

  template <int kCount>
  __device__ __forceinline__ void run(const Piece& piece, int64_t i, double (&sums)[2]) const {
    float before[kCount], x[kCount], direction[kCount] = {};
    W* w = static_cast<W*>(piece.weight) + i;
    const int64_t at = piece.offset + i;
    load(w, before);
    load(static_cast<const M*>(piece.master) + i, x);
    if (kRounding != Rounding::kRestore || v) load(v + at, direction);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (kRounding != Rounding::kRestore) x[j] = __fadd_rn(x[j], __fmul_rn(direction[j], h));
    if (kRounding == Rounding::kStochastic && sizeof(W) == 2) {
      const uint32_t drop = std::is_same<W, bf16>::value ? 16 : 13;
      uint32_t random[kCount];
      draw(seed, at, random);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        x[j] = __uint_as_float(probe::round_stochastically(__float_as_uint(x[j]), random[j], drop));
    }
    store(w, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (at + j >= owned) continue;
      const double change = static_cast<double>(x[j]) - static_cast<double>(before[j]);
      add_product(sums[0], change, direction[j]);
      add_product(sums[1], change, change);
    }
  }
};

// Every block passes over all pieces: large ones occupy all blocks, small ones the first few.
template <class Body>
__global__ void __launch_bounds__(kThreads)
    displace_kernel(Body body, const __grid_constant__ Pieces table, double* partials) {
  double sums[2] = {};
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int p = 0; p < table.count; ++p) {
    const Piece& piece = table.pieces[p];
    const Division division = piece.division;
    for (int64_t k = first; k < division.vectors; k += stride)
      body.template run<kVector>(piece, division.head + k * kVector, sums);
    for (int64_t k = first; k < division.singles(); k += stride)
      body.template run<1>(piece, k < division.head ? k : k + division.vectors * kVector, sums);
  }
  block_sums<kThreads>(sums, partials + blockIdx.x * int64_t{2});
}

struct DisplaceArguments {
  const float* v;
  float h;
  int64_t owned;
  uint64_t seed;
  bool more;  // add to the sums of the shards before
};

typedef void (*DisplacePieces)(const Pieces&, int64_t, const DisplaceArguments&, double*,
                               const Launch&);

template <Rounding kRounding, class W, class M>
void displace_pieces(const Pieces& table, int64_t items, const DisplaceArguments& a, double* out,
                     const Launch& launch) {
  const int grid = grid_for(items, launch.device);
  const Displace<kRounding, W, M> body = {a.v, a.h, a.owned, a.seed};
  displace_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(body, table, launch.workspace);
  check(cudaGetLastError(), "displace_kernel");
  finish(launch, grid, 2, out, a.more);
}

template <Rounding kRounding, class W>
DisplacePieces pick_master(Dtype master) {
  switch (master) {
    case Dtype::kBFloat16:
      return displace_pieces<kRounding, W, bf16>;
    case Dtype::kFloat16:
      return displace_pieces<kRounding, W, fp16>;
    default:
      return displace_pieces<kRounding, W, float>;
  }
}

template <Rounding kRounding>
DisplacePieces pick(const Shard& shard) {
  switch (shard.weight_dtype) {
    case Dtype::kBFloat16:
      return pick_master<kRounding, bf16>(shard.master_dtype);
    case Dtype::kFloat16:
      return pick_master<kRounding, fp16>(shard.master_dtype);
    default:
      return pick_master<kRounding, float>(shard.master_dtype);
  }
}

DisplacePieces pick(const Shard& shard, Rounding rounding) {
  switch (rounding) {
    case Rounding::kRestore:
      return pick<Rounding::kRestore>(shard);
    case Rounding::kNearest:
      return pick<Rounding::kNearest>(shard);
    default:
      return pick<Rounding::kStochastic>(shard);
  }
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

bool alike(const Shard& a, const Shard& b) {
  return a.weight_dtype == b.weight_dtype && a.master_dtype == b.master_dtype;
}

struct Product {
  static constexpr int kSums = 1;
  const float *a, *b;
  int64_t owned;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[1]) const {
    float x[kCount], y[kCount];
    load(a + i, x);
    load(b + i, y);
#pragma unroll
    for (int j = 0; j < kCount; ++j) add_product(sums[0], x[j], y[j]);
  }
};

template <bool kPrevious, bool kZero>
struct Difference {
  static constexpr int kSums = 5;
  float* plus;
  const float *minus, *v, *previous, *zero;
  float scale;
  int64_t owned;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[5]) const {
    float a[kCount], b[kCount], direction[kCount], before[kCount], z[kCount], p[kCount];
    load(plus + i, a);
    load(minus + i, b);
    load(v + i, direction);
    if (kPrevious) load(previous + i, before);
    if (kZero) load(zero + i, z);
#pragma unroll
    for (int j = 0; j < kCount; ++j) p[j] = __fmul_rn(__fsub_rn(a[j], b[j]), scale);
    store(plus + i, p);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (i + j >= owned) continue;
      add_product(sums[0], p[j], direction[j]);
      if (kPrevious) add_product(sums[1], p[j], before[j]);
      add_product(sums[2], p[j], p[j]);
      if (!kZero) continue;
      const double s = static_cast<double>(a[j]) + b[j] - 2.0 * z[j];
      add_product(sums[3], s, s);
      add_product(sums[4], s, p[j]);
    }
  }
};

struct Curvature {
  static constexpr int kSums = 2;
  const float *plus, *minus, *zero;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[2]) const {
    float a[kCount], b[kCount], z[kCount];
    load(plus + i, a);
    load(minus + i, b);
    load(zero + i, z);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const double d = static_cast<double>(a[j]) - b[j];
      const double s = static_cast<double>(a[j]) + b[j] - 2.0 * z[j];
      add_product(sums[0], d, d);
      add_product(sums[1], s, s);
    }
  }
};

template <bool kPrevious>
struct Update {
  static constexpr int kSums = 1;
  float* w;
  const float *v, *previous;
  double alpha, beta;
  int64_t owned;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[1]) const {
    float x[kCount], direction[kCount], before[kCount];
    load(w + i, x);
    load(v + i, direction);
    if (kPrevious) load(previous + i, before);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      double updated = __dsub_rn(x[j], __dmul_rn(direction[j], alpha));
      if (kPrevious) updated = __dsub_rn(updated, __dmul_rn(before[j], beta));
      x[j] = static_cast<float>(updated);
    }
    store(w + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (i + j < owned) add_product(sums[0], x[j], x[j]);
  }
};

template <class Row>
struct Normalize {
  static constexpr int kSums = 1;
  const float* w;
  float* v;
  Row* row;
  float scale;
  int64_t owned;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[1]) const {
    float x[kCount];
    load(w + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = __fmul_rn(x[j], scale);
    if (row) store(row + i, x);
    store(v + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (i + j < owned) add_product(sums[0], x[j], x[j]);
  }
};

template <class Row>
void normalize_to(const float* w, float scale, float* v, Row* row, int64_t n, int64_t owned,
                  double* out, const Launch& launch) {
  const Division division = divide(n, {{w, 4}, {v, 4}, {row, int64_t{sizeof(Row)}}});
  stream(Normalize<Row>{w, v, row, scale, owned}, division, out, launch);
}

}  // namespace

int64_t workspace_size(int64_t sums, int device) {
  return static_cast<int64_t>(sm_count(device)) * kBlocksPerSm * std::max<int64_t>(sums, 1);
}

uint32_t required_features() { return 0; }

void displace(const std::vector<Shard>& shards, const float* v, float h, int64_t owned,
              Rounding rounding, uint64_t seed, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  if (shards.empty()) {
    check(cudaMemsetAsync(out, 0, 2 * sizeof(double), stream_of(launch)), "cudaMemsetAsync");
    return;
  }
  int64_t offset = 0;
  for (size_t i = 0; i < shards.size();) {
    const Shard& leader = shards[i];
    const bool more = i > 0;
    Pieces table;
    table.count = 0;
    int64_t items = 1;
    for (; i < shards.size() && table.count < kShardsPerLaunch && alike(leader, shards[i]); ++i) {
      const Shard& s = shards[i];
      const Division division = divide(s.length, {{s.weight, size_of(s.weight_dtype)},
                                                  {s.master, size_of(s.master_dtype)},
                                                  {v ? v + offset : nullptr, 4}});
      table.pieces[table.count++] = {s.weight, s.master, offset, division};
      items = std::max({items, division.vectors, division.singles()});
      offset += s.length;
    }
    pick(leader, rounding)(table, items, {v, h, owned, seed, more}, out, launch);
  }
}

void dots(const std::vector<Pair>& pairs, int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  for (size_t p = 0; p < pairs.size(); ++p) {
    const Product body = {pairs[p].a, pairs[p].b, owned};
    stream(body, divide(owned, {{body.a, 4}, {body.b, 4}}), out + p, launch);
  }
}

void difference(float* plus, const float* minus, float scale, const float* v, const float* previous,
                const float* zero, int64_t n, int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  const Division division = divide(n, {{plus, 4}, {minus, 4}, {v, 4}, {previous, 4}, {zero, 4}});
  const auto run = [&](auto body) { stream(body, division, out, launch); };
  if (previous && zero)
    run(Difference<true, true>{plus, minus, v, previous, zero, scale, owned});
  else if (previous)
    run(Difference<true, false>{plus, minus, v, previous, zero, scale, owned});
  else if (zero)
    run(Difference<false, true>{plus, minus, v, previous, zero, scale, owned});
  else
    run(Difference<false, false>{plus, minus, v, previous, zero, scale, owned});
}

void curvature_ratio(const float* plus, const float* minus, const float* zero, int64_t owned,
                     double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  stream(Curvature{plus, minus, zero}, divide(owned, {{plus, 4}, {minus, 4}, {zero, 4}}), out,
         launch);
}

void lanczos_update(float* w, const float* v, const float* previous, double alpha, double beta,
                    int64_t n, int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  const Division division = divide(n, {{w, 4}, {v, 4}, {previous, 4}});
  if (previous)
    stream(Update<true>{w, v, previous, alpha, beta, owned}, division, out, launch);
  else
    stream(Update<false>{w, v, previous, alpha, beta, owned}, division, out, launch);
}

void normalize_store(const float* w, float scale, float* v, void* row, Dtype row_dtype, int64_t n,
                     int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  switch (row_dtype) {
    case Dtype::kBFloat16:
      return normalize_to(w, scale, v, static_cast<bf16*>(row), n, owned, out, launch);
    case Dtype::kFloat16:
      return normalize_to(w, scale, v, static_cast<fp16*>(row), n, owned, out, launch);
    default:
      return normalize_to(w, scale, v, static_cast<float*>(row), n, owned, out, launch);
  }
}

void copy(void* to, const void* from, int64_t bytes, const Launch& launch) {
  const OnDevice guard(launch.device);
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                        stream_of(launch)),
        "cudaMemcpyAsync");
}

}  // namespace cuda
}  // namespace ds_hessian
