// Kernels that pass over vectors once: displacement, difference, normalisation.
#include <algorithm>
#include <utility>

#include "common.cuh"

namespace ds_hessian {
namespace cuda {
namespace {

// A product of two widened fp32 values is exact, so that contracting it changes nothing.
__device__ __forceinline__ void add_product(double& sum, double a, double b) {
  sum = fma(a, b, sum);
}

constexpr int kShardsPerLaunch = 56;  // their table travels in the kernel's arguments

struct Piece {
  void* weight;
  const void* master;
  int64_t offset;   // of the shard in the vector
  unsigned blocks;  // that the pieces before it occupy
  Division division;
};

struct Pieces {
  Piece pieces[kShardsPerLaunch];
  int count;
};
static_assert(sizeof(Pieces) <= 3840, "kernel arguments are limited to 4 KB");

template <bool kMove, class W, class M>
struct Displace {
  const float* v;
  float h;
  int64_t owned;

  template <int kCount>
  __device__ __forceinline__ void run(const Piece& piece, int64_t i, double (&sums)[2]) const {
    float before[kCount], x[kCount], direction[kCount] = {};
    W* w = static_cast<W*>(piece.weight) + i;
    const int64_t at = piece.offset + i;
    load(w, before);
    load(static_cast<const M*>(piece.master) + i, x);
    if (v) load(v + at, direction);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (kMove) x[j] = __fadd_rn(x[j], __fmul_rn(direction[j], h));
    store(w, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (at + j >= owned) continue;
      const double change = static_cast<double>(x[j]) - static_cast<double>(before[j]);
      if (v) add_product(sums[0], change, direction[j]);  // 0 x Inf is not 0
      add_product(sums[1], change, change);
    }
  }
};

// A piece of a table as a body of `run_division`.
template <class Body>
struct OnPiece {
  const Body& body;
  const Piece& piece;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[2]) const {
    body.template run<kCount>(piece, i, sums);
  }
};

// Every block passes over all pieces. Each begins with the block after those that the pieces before
// it occupy: large ones keep all blocks busy, small ones are spread over them.
template <class Body>
__global__ void __launch_bounds__(kThreads, kResident)
    displace_kernel(Body body, const __grid_constant__ Pieces table, double* partials) {
  ThreadSums<2> sums;
  for (int p = 0; p < table.count; ++p) {
    const Piece& piece = table.pieces[p];
    const unsigned turn = (blockIdx.x + gridDim.x - piece.blocks % gridDim.x) % gridDim.x;
    run_division(OnPiece<Body>{body, piece}, piece.division, turn, sums);
  }
  sums.close();
  block_sums<kThreads>(sums.plain, partials + blockIdx.x * int64_t{2});
}

struct DisplaceArguments {
  const float* v;
  float h;
  int64_t owned;
  bool more;  // add to the sums of the shards before
};

typedef void (*DisplacePieces)(const Pieces&, int64_t, const DisplaceArguments&, double*,
                               const Launch&);

template <bool kMove, class W, class M>
void displace_pieces(const Pieces& table, int64_t blocks, const DisplaceArguments& a, double* out,
                     const Launch& launch) {
  const int grid = grid_for(blocks);
  const Displace<kMove, W, M> body = {a.v, a.h, a.owned};
  displace_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(body, table, launch.workspace);
  check(cudaGetLastError(), "displace_kernel");
  finish(launch, grid, 2, out, a.more);
}

template <bool kMove, class W>
DisplacePieces pick_master(Dtype master) {
  switch (master) {
    case Dtype::kBFloat16:
      return displace_pieces<kMove, W, bf16>;
    case Dtype::kFloat16:
      return displace_pieces<kMove, W, fp16>;
    default:
      return displace_pieces<kMove, W, float>;
  }
}

template <bool kMove>
DisplacePieces pick(const Shard& shard) {
  switch (shard.weight_dtype) {
    case Dtype::kBFloat16:
      return pick_master<kMove, bf16>(shard.master_dtype);
    case Dtype::kFloat16:
      return pick_master<kMove, fp16>(shard.master_dtype);
    default:
      return pick_master<kMove, float>(shard.master_dtype);
  }
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// Shards in the order of their dtypes, each with its offset in the vector: those of one kind share
// launches wherever they lie.
std::vector<std::pair<Shard, int64_t>> sorted(const std::vector<Shard>& shards) {
  std::vector<std::pair<Shard, int64_t>> placed;
  int64_t offset = 0;
  for (const Shard& shard : shards) {
    placed.emplace_back(shard, offset);
    offset += shard.length;
  }
  std::stable_sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first.weight_dtype, a.first.master_dtype) <
           std::make_pair(b.first.weight_dtype, b.first.master_dtype);
  });
  return placed;
}

bool alike(const Shard& a, const Shard& b) {
  return a.weight_dtype == b.weight_dtype && a.master_dtype == b.master_dtype;
}

constexpr int kPairs = 4;  // pairs in a launch: their sums stay in registers

template <int kCountPairs>
struct Products {
  static constexpr int kSums = kCountPairs;
  Pair pairs[kCountPairs];

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[kCountPairs]) const {
#pragma unroll
    for (int p = 0; p < kCountPairs; ++p) {
      float x[kCount], y[kCount];
      load(pairs[p].a + i, x);
      load(pairs[p].b + i, y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) add_product(sums[p], x[j], y[j]);
    }
  }
};

template <int kCountPairs>
void products(const Pair* pairs, int64_t owned, double* out, const Launch& launch) {
  Products<kCountPairs> body;
  std::vector<Operand> operands;
  for (int p = 0; p < kCountPairs; ++p) {
    body.pairs[p] = pairs[p];
    operands.insert(operands.end(), {{pairs[p].a, 4}, {pairs[p].b, 4}});
  }
  stream(body, divide(owned, operands), out, launch);
}

template <bool kZero>
struct Difference {
  static constexpr int kSums = 2;
  float* plus;
  const float *minus, *zero;
  float scale;
  int64_t owned;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[2]) const {
    float a[kCount], b[kCount], z[kCount], p[kCount];
    load(plus + i, a);
    load(minus + i, b);
    if (kZero) load(zero + i, z);
#pragma unroll
    for (int j = 0; j < kCount; ++j) p[j] = __fmul_rn(__fsub_rn(a[j], b[j]), scale);
    store(plus + i, p);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (i + j >= owned) continue;
      add_product(sums[0], p[j], p[j]);
      if (!kZero) continue;
      const double s = static_cast<double>(a[j]) + b[j] - 2.0 * z[j];
      add_product(sums[1], s, s);
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

int64_t workspace_size(int64_t sums) { return kMaxBlocks * std::max<int64_t>(sums, 1); }

uint32_t required_features() { return 0; }

void displace(const std::vector<Shard>& shards, const float* v, float h, int64_t owned, double* out,
              const Launch& launch) {
  const OnDevice guard(launch.device);
  if (shards.empty()) {
    check(cudaMemsetAsync(out, 0, 2 * sizeof(double), stream_of(launch)), "cudaMemsetAsync");
    return;
  }
  const auto placed = sorted(shards);
  for (size_t i = 0; i < placed.size();) {
    const Shard& leader = placed[i].first;
    const bool more = i > 0;
    Pieces table;
    table.count = 0;
    int64_t blocks = 0;
    for (; i < placed.size() && table.count < kShardsPerLaunch && alike(leader, placed[i].first);
         ++i) {
      const auto& [s, offset] = placed[i];
      const Division division = divide(s.length, {{s.weight, size_of(s.weight_dtype)},
                                                  {s.master, size_of(s.master_dtype)},
                                                  {v ? v + offset : nullptr, 4}});
      table.pieces[table.count++] = {s.weight, s.master, offset, static_cast<unsigned>(blocks),
                                     division};
      blocks += blocks_for(std::max(division.vectors, division.singles()));
    }
    const auto run = h != 0 ? pick<true>(leader) : pick<false>(leader);
    run(table, blocks, {v, h, owned, more}, out, launch);
  }
}

void dots(const std::vector<Pair>& pairs, int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  constexpr decltype(&products<1>) kRuns[kPairs] = {products<1>, products<2>, products<3>,
                                                    products<4>};
  for (size_t p = 0; p < pairs.size(); p += kPairs) {
    const size_t count = std::min(pairs.size() - p, size_t{kPairs});
    kRuns[count - 1](&pairs[p], owned, out + p, launch);
  }
}

void difference(float* plus, const float* minus, float scale, const float* zero, int64_t n,
                int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  const Division division = divide(n, {{plus, 4}, {minus, 4}, {zero, 4}});
  if (zero)
    stream(Difference<true>{plus, minus, zero, scale, owned}, division, out, launch);
  else
    stream(Difference<false>{plus, minus, zero, scale, owned}, division, out, launch);
}

void curvature_ratio(const float* plus, const float* minus, const float* zero, int64_t owned,
                     double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  stream(Curvature{plus, minus, zero}, divide(owned, {{plus, 4}, {minus, 4}, {zero, 4}}), out,
         launch);
}

void normalize_store(const float* w, float scale, float* v, void* row, Dtype row_dtype, int64_t n,
                     int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  if (row_dtype == Dtype::kBFloat16)
    normalize_to(w, scale, v, static_cast<bf16*>(row), n, owned, out, launch);
  else
    normalize_to(w, scale, v, static_cast<float*>(row), n, owned, out, launch);
}

void copy(void* to, const void* from, int64_t bytes, const Launch& launch) {
  const OnDevice guard(launch.device);
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                        stream_of(launch)),
        "cudaMemcpyAsync");
}

}  // namespace cuda
}  // namespace ds_hessian
