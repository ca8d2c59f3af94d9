// Products with a basis: project, subtract, both fused, and linear combinations.
//
// The fused kernels keep a tile of columns, all rows of it, in shared memory between its two uses,
// so that the basis is read from memory once. Several blocks share a multiprocessor: one computes
// while the others wait for their tiles.
#include <cuda_pipeline.h>

#include "common.cuh"

namespace ds_hessian {
namespace cuda {
namespace {

constexpr int kRowGroup = 8;       // rows whose sums a thread holds in registers
constexpr int kProjectRows = 256;  // of a launch of `project`: 32 KB of sums
constexpr int kTileThreads = 512;  // of a block of the fused kernels
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kMaxWidth = 2048;            // columns of a tile
constexpr int64_t kTileBytes = 49 << 10;   // two blocks share 100 KB, and 1 KB each is the system's
constexpr int64_t kBlockBytes = 64 << 10;  // of shared memory that every device gives to a block
constexpr int64_t kProjectTiles = 512;     // of `project`: what a hundred multiprocessors hold
constexpr int kWarps = kThreads / 32;
constexpr int kChain = 8;  // products that are added up before they go to a sum

// Rows of the fused kernel, at most: a multiple of its warps. Beyond 429 rows of fp32 no tile fits
// into kBlockBytes, and sums of 512 do not fit into registers.
template <class T>
constexpr int kMaxRows = sizeof(T) == 4 ? 27 * kTileWarps : 32 * kTileWarps;

// What products with elements of a basis are formed and added up in, kChain at a time. Of fp32 rows
// in fp64, where they are exact: such a chain simply continues the sum that it goes to. Of bf16
// rows in fp32: conversions to fp64, of which a multiprocessor makes 16 a clock, and fp64
// arithmetic, which consumer devices make at 1/64 of the rate of fp32, are then paid once for each
// chain.
template <class T>
struct Chain {
  using type = double;
};
template <>
struct Chain<bf16> {
  using type = float;
};
template <class T>
using ChainOf = typename Chain<T>::type;

__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double begin_chain(double sum, double) { return sum; }
__device__ __forceinline__ float begin_chain(double, float) { return 0.0f; }
__device__ __forceinline__ double end_chain(double, double chain) { return chain; }
__device__ __forceinline__ double end_chain(double sum, float chain) { return sum + chain; }

template <class T>
struct Matrix {
  const T* data;
  int64_t stride;
  int rows;

  __device__ __forceinline__ const T* row(int r) const { return data + r * stride; }
};

template <class T>
Matrix<T> matrix_of(const Basis& basis, int64_t first, int64_t rows) {
  const T* data = static_cast<const T*>(basis.data) + first * basis.stride;
  return {data, basis.stride, static_cast<int>(rows)};
}

// Rows that start at multiples of 16 bytes.
template <class T>
bool aligned(const Matrix<T>& basis) {
  const int64_t step = basis.rows > 1 ? basis.stride * static_cast<int64_t>(sizeof(T)) : 0;
  return reinterpret_cast<uintptr_t>(basis.data) % 16 == 0 && step % 16 == 0;
}

// Two neighbouring elements in shared memory, at an even column, by one access.
__device__ __forceinline__ void load_pair(const float* from, float (&x)[2]) {
  const float2 pair = *reinterpret_cast<const float2*>(from);
  x[0] = pair.x;
  x[1] = pair.y;
}
__device__ __forceinline__ void load_pair(const bf16* from, float (&x)[2]) {
  const uint32_t pair = *reinterpret_cast<const uint32_t*>(from);
  x[0] = __uint_as_float(pair << 16);
  x[1] = __uint_as_float(pair & 0xFFFF0000u);
}

// Adds the products of rows [first, first + kRowGroup) with w over columns [begin, end) to the
// slots of this warp. kCount == kVector needs everything aligned to 16 bytes.
template <int kCount, class T>
__device__ __forceinline__ void project_group(const Matrix<T>& basis, int first, const float* w,
                                              int64_t begin, int64_t end, Compensated* slots) {
  using C = ChainOf<T>;
  double sums[kRowGroup] = {};
  const int rows = min(kRowGroup, basis.rows - first);
  int64_t i = begin + static_cast<int64_t>(threadIdx.x) * kCount;
  for (; i + kCount <= end; i += kThreads * kCount) {
    float x[kCount];
    C wide[kCount];  // converted once for all rows
    load(w + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) wide[j] = x[j];
#pragma unroll
    for (int r = 0; r < kRowGroup; ++r) {
      if (r >= rows) continue;
      float y[kCount];
      load(basis.row(first + r) + i, y);
      C chain = begin_chain(sums[r], C{});
#pragma unroll
      for (int j = 0; j < kCount; ++j) chain = multiply_add(static_cast<C>(y[j]), wide[j], chain);
      sums[r] = end_chain(sums[r], chain);
    }
  }
  for (; i < end; ++i)  // at most one thread has such a rest
    for (int r = 0; r < rows; ++r)
      sums[r] += static_cast<double>(static_cast<C>(decode(basis.row(first + r)[i])) * w[i]);
#pragma unroll
  for (int r = 0; r < kRowGroup; ++r) {
    if (r >= rows) continue;
    const double total = warp_sum(sums[r]);
    if (threadIdx.x % 32 == 0) slots[first + r].add(total);
  }
}

// partials[block * rows + r] = the products of this block's tiles. The tile of w stays in the
// caches while the groups of rows pass by.
template <bool kAligned, class T>
__global__ void __launch_bounds__(kThreads, kResident)
    project_kernel(Matrix<T> basis, const float* w, int64_t owned, int64_t width,
                   double* partials) {
  extern __shared__ Compensated slots[];  // (kWarps, rows)
  const int rows = basis.rows;
  for (int k = threadIdx.x; k < kWarps * rows; k += kThreads) slots[k] = {0.0, 0.0};
  __syncthreads();
  Compensated* mine = slots + threadIdx.x / 32 * rows;
  for (int64_t tile = blockIdx.x; tile * width < owned; tile += gridDim.x) {
    const int64_t begin = tile * width, end = min(begin + width, owned);
    for (int first = 0; first < rows; first += kRowGroup)
      project_group<kAligned ? kVector : 1>(basis, first, w, begin, end, mine);
  }
  __syncthreads();
  for (int r = threadIdx.x; r < rows; r += kThreads) {
    double total = 0.0;
    for (int warp = 0; warp < kWarps; ++warp) total += slots[warp * rows + r].value();
    partials[static_cast<int64_t>(blockIdx.x) * rows + r] = total;
  }
}

template <class T>
void project_of(const Basis& basis, const float* w, int64_t owned, double* out,
                const Launch& launch) {
  // Enough tiles to keep a device busy, none so wide that w drops out of the caches or that a
  // thread's chain of additions passes kChainLength.
  const int64_t even = (owned + kProjectTiles - 1) / kProjectTiles;
  const int64_t width =
      std::min<int64_t>(16384, std::max<int64_t>(2048, (even + 2047) / 2048 * 2048));
  const int grid = grid_for((owned + width - 1) / width);
  for (int64_t first = 0; first < basis.rows; first += kProjectRows) {
    const int64_t rows = std::min<int64_t>(kProjectRows, basis.rows - first);
    const Matrix<T> part = matrix_of<T>(basis, first, rows);
    const size_t shared = static_cast<size_t>(rows) * kWarps * sizeof(Compensated);
    const bool vectors = aligned(part) && reinterpret_cast<uintptr_t>(w) % 16 == 0;
    const auto kernel = vectors ? project_kernel<true, T> : project_kernel<false, T>;
    kernel<<<grid, kThreads, shared, stream_of(launch)>>>(part, w, owned, width, launch.workspace);
    check(cudaGetLastError(), "project_kernel");
    finish(launch, grid, rows, out + first, false);
  }
}

// sums[j] += the products of columns [i, i + kCount) of all rows with their coefficients, negated
// where kNegate: row by row, in chains of kChain rows. The order in every kernel, so that
// `subtract` and `subtract_project` write the same bits on every device.
template <bool kNegate, int kCount, class T>
__device__ __forceinline__ void add_rows(const Matrix<T>& basis, const double* coefficients,
                                         int64_t i, double (&sums)[kCount]) {
  using C = ChainOf<T>;
  for (int first = 0; first < basis.rows; first += kChain) {
    C chain[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) chain[j] = begin_chain(sums[j], C{});
#pragma unroll 4
    for (int r = first; r < min(first + kChain, basis.rows); ++r) {
      const double coefficient = __ldg(coefficients + r);
      const C c = static_cast<C>(kNegate ? -coefficient : coefficient);
      float y[kCount];
      load(basis.row(r) + i, y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) chain[j] = multiply_add(static_cast<C>(y[j]), c, chain[j]);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] = end_chain(sums[j], chain[j]);
  }
}

template <class T>
struct Subtract {
  static constexpr int kSums = 1;
  Matrix<T> basis;
  float* w;
  const double* coefficients;
  int64_t owned;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&sums)[1]) const {
    float x[kCount];
    double updated[kCount];
    load(w + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) updated[j] = x[j];
    add_rows<true>(basis, coefficients, i, updated);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = static_cast<float>(updated[j]);
    store(w + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (i + j < owned) sums[0] = __fma_rn(x[j], x[j], sums[0]);
  }
};

template <class T>
Division divide_rows(const Basis& basis, const void* w, int64_t n) {
  return divide(n, {{basis.data, int64_t{sizeof(T)}, basis.rows > 1 ? basis.stride : 0}, {w, 4}});
}

template <class T>
void subtract_of(const Basis& basis, float* w, const double* coefficients, int64_t n, int64_t owned,
                 double* out, const Launch& launch) {
  const Subtract<T> body = {matrix_of<T>(basis, 0, basis.rows), w, coefficients, owned};
  stream(body, divide_rows<T>(basis, w, n), out, launch);
}

// Columns [begin, begin + columns) of all rows into `tile` (rows, width), a row by a warp. Ends
// with a barrier.
template <class T>
__device__ __forceinline__ void load_tile(const Matrix<T>& basis, int64_t begin, int columns,
                                          int width, bool vectors, T* tile) {
  constexpr int kPerAccess = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  if (vectors && columns == width) {
    for (int r = threadIdx.x / 32; r < basis.rows; r += kTileWarps)
      for (int c = lane * kPerAccess; c < width; c += 32 * kPerAccess)
        __pipeline_memcpy_async(tile + r * width + c, basis.row(r) + begin + c, 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
  } else {
    for (int r = threadIdx.x / 32; r < basis.rows; r += kTileWarps)
      for (int c = lane; c < columns; c += 32) tile[r * width + c] = basis.row(r)[begin + c];
  }
  __syncthreads();
}

// Two neighbouring columns of a tile, summed as `add_rows` sums them. `tile` begins with the first
// of the columns.
template <class T>
__device__ __forceinline__ void add_tile_rows(const T* tile, int rows, int width,
                                              const ChainOf<T>* coefficients, double (&sums)[2]) {
  using C = ChainOf<T>;
  for (int first = 0; first < rows; first += kChain) {
    C chain[2] = {begin_chain(sums[0], C{}), begin_chain(sums[1], C{})};
#pragma unroll 4
    for (int r = first; r < min(first + kChain, rows); ++r) {
      float y[2];
      load_pair(tile + r * width, y);
      chain[0] = multiply_add(static_cast<C>(y[0]), coefficients[r], chain[0]);
      chain[1] = multiply_add(static_cast<C>(y[1]), coefficients[r], chain[1]);
    }
    sums[0] = end_chain(sums[0], chain[0]);
    sums[1] = end_chain(sums[1], chain[1]);
  }
}

// w of one tile, updated; also in `next` (width). `coefficients` are negated.
template <class T>
__device__ __forceinline__ void update_tile(const T* tile, int rows, int columns, int width,
                                            const ChainOf<T>* coefficients, float* w,
                                            ChainOf<T>* next) {
  for (int c = 2 * static_cast<int>(threadIdx.x); c < columns; c += 2 * kTileThreads) {
    const bool both = c + 1 < columns;
    double sums[2] = {w[c], both ? w[c + 1] : 0.0f};
    add_tile_rows(tile + c, rows, width, coefficients, sums);
    const float first = static_cast<float>(sums[0]), second = static_cast<float>(sums[1]);
    w[c] = first;
    next[c] = first;
    if (!both) continue;
    w[c + 1] = second;
    next[c + 1] = second;
  }
  __syncthreads();
}

// sums[q] += the products of row warp + q * kTileWarps with x over this lane's columns among
// [0, counted). kWhole: no column of the kChain from c on is beyond.
template <bool kWhole, int kRowsPerWarp, class T>
__device__ __forceinline__ void project_chain(const T* tile, int rows, int width,
                                              const ChainOf<T>* x, int c, int counted,
                                              double (&sums)[kRowsPerWarp]) {
  using C = ChainOf<T>;
  C wide[kChain];
#pragma unroll
  for (int k = 0; k < kChain; ++k) {
    const int column = c + k / 2 * 64 + k % 2;
    wide[k] = kWhole || column < counted ? x[column] : C{};
  }
#pragma unroll
  for (int q = 0; q < kRowsPerWarp; ++q) {
    const int r = static_cast<int>(threadIdx.x) / 32 + q * kTileWarps;
    if (r >= rows) continue;
    C chain = begin_chain(sums[q], C{});
#pragma unroll
    for (int k = 0; k < kChain; k += 2) {
      const int column = c + k / 2 * 64;
      if (!kWhole && column >= counted) continue;
      float y[2];
      load_pair(tile + r * width + column, y);
      chain = multiply_add(static_cast<C>(y[0]), wide[k], chain);
      if (kWhole || column + 1 < counted)
        chain = multiply_add(static_cast<C>(y[1]), wide[k + 1], chain);
    }
    sums[q] = end_chain(sums[q], chain);
  }
}

// The shared memory of a fused block: compensated sums and coefficients of the rows, w of the tile,
// and the tile.
template <class T>
struct FusedMemory {
  static __host__ __device__ int64_t per_row() { return sizeof(Compensated) + sizeof(double); }
  static __host__ __device__ int64_t per_column(int64_t rows) {
    return rows * static_cast<int64_t>(sizeof(T)) + static_cast<int64_t>(sizeof(double));
  }
  static __host__ __device__ int64_t even(int64_t rows) { return (rows + 1) / 2 * 2; }

  Compensated* totals;
  ChainOf<T>*coefficients, *next;
  T* tile;

  __device__ FusedMemory(unsigned char* memory, int rows, int width) {
    totals = reinterpret_cast<Compensated*>(memory);
    memory += even(rows) * sizeof(Compensated);
    coefficients = reinterpret_cast<ChainOf<T>*>(memory);
    memory += even(rows) * sizeof(double);
    next = reinterpret_cast<ChainOf<T>*>(memory);
    tile = reinterpret_cast<T*>(memory + width * sizeof(double));
  }
};

// Warp k forms the products of rows k, k + kTileWarps, ... of each tile. A lane keeps its share of
// them in registers for kChainLength columns, then the warp adds it to its compensated totals.
// partials[block * rows + ...].
template <int kRowsPerWarp, class T>
__global__ void __launch_bounds__(kTileThreads, kRowsPerWarp <= 8 ? 2 : 1)
    fused_kernel(Matrix<T> basis, float* w, const double* coefficients, int64_t n, int64_t owned,
                 int width, bool vectors, double* partials) {
  extern __shared__ __align__(16) unsigned char memory[];
  const FusedMemory<T> shared(memory, basis.rows, width);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int r = threadIdx.x; r < basis.rows; r += kTileThreads) {
    shared.totals[r] = {0.0, 0.0};
    shared.coefficients[r] = static_cast<ChainOf<T>>(-coefficients[r]);
  }
  __syncthreads();  // a block without a tile, where n is 0, adds to its totals at once
  double sums[kRowsPerWarp] = {};
  const auto collect = [&] {
#pragma unroll
    for (int q = 0; q < kRowsPerWarp; ++q) {
      const int r = warp + q * kTileWarps;
      if (r >= basis.rows) continue;
      const double total = warp_sum(sums[q]);
      if (lane == 0) shared.totals[r].add(total);
      sums[q] = 0.0;
    }
  };
  int summed = 0;  // columns a lane
  for (int64_t k = blockIdx.x; k * width < n; k += gridDim.x) {
    const int64_t begin = k * width;
    const int columns = static_cast<int>(min(static_cast<int64_t>(width), n - begin));
    load_tile(basis, begin, columns, width, vectors, shared.tile);
    update_tile(shared.tile, basis.rows, columns, width, shared.coefficients, w + begin,
                shared.next);
    const int counted = static_cast<int>(
        max(static_cast<int64_t>(0), min(static_cast<int64_t>(columns), owned - begin)));
    for (int c = 2 * lane; c < counted; c += 32 * kChain) {
      if (c + 32 * kChain - 63 < counted)
        project_chain<true>(shared.tile, basis.rows, width, shared.next, c, counted, sums);
      else
        project_chain<false>(shared.tile, basis.rows, width, shared.next, c, counted, sums);
    }
    if ((summed += (width + 31) / 32) >= kChainLength) {
      collect();
      summed = 0;
    }
    __syncthreads();  // before the tile is overwritten
  }
  collect();
  double* mine = partials + static_cast<int64_t>(blockIdx.x) * basis.rows;
  for (int r = warp; r < basis.rows; r += kTileWarps)
    if (lane == 0) mine[r] = shared.totals[r].value();
}

// How wide a tile may be so that two blocks share a multiprocessor (or one, where it must be):
// a power of two within [32, kMaxWidth], or 0 if not even 32 columns of all rows fit. The smallest
// device decides: the same width on all of them gives the same sums.
int tile_width(int64_t bytes_per_column, int64_t fixed) {
  for (int width = kMaxWidth; width >= 32; width /= 2)
    if (fixed + width * bytes_per_column <= (width > 32 ? kTileBytes : kBlockBytes)) return width;
  return 0;
}

template <class Kernel>
void allow_shared(Kernel kernel, size_t shared) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared)),
        "cudaFuncSetAttribute");
}

template <class T>
void subtract_project_of(const Basis& basis, float* w, const double* coefficients, int64_t n,
                         int64_t owned, double* out, const Launch& launch) {
  using Memory = FusedMemory<T>;
  const int64_t fixed = Memory::even(basis.rows) * Memory::per_row();
  const int width = tile_width(Memory::per_column(basis.rows), fixed);
  if (basis.rows == 0 || basis.rows > kMaxRows<T> ||
      width == 0) {  // the tile does not fit: two passes
    subtract_of<T>(basis, w, coefficients, n, owned, nullptr, launch);
    project_of<T>(basis, w, owned, out, launch);
    return;
  }
  const Matrix<T> matrix = matrix_of<T>(basis, 0, basis.rows);
  const int per_warp = (matrix.rows + kTileWarps - 1) / kTileWarps;
  const auto kernel = per_warp <= 2    ? fused_kernel<2, T>
                      : per_warp <= 4  ? fused_kernel<4, T>
                      : per_warp <= 8  ? fused_kernel<8, T>
                      : per_warp <= 16 ? fused_kernel<16, T>
                                       : fused_kernel<kMaxRows<T> / kTileWarps, T>;
  const size_t shared = static_cast<size_t>(fixed + width * Memory::per_column(basis.rows));
  const int grid = grid_for((n + width - 1) / width);
  allow_shared(kernel, shared);
  kernel<<<grid, kTileThreads, shared, stream_of(launch)>>>(
      matrix, w, coefficients, n, owned, width, aligned(matrix), launch.workspace);
  check(cudaGetLastError(), "fused_kernel");
  finish(launch, grid, basis.rows, out, false);
}

// Two columns of two outputs: an element is loaded and converted once for both.
template <class T>
__device__ __forceinline__ void combine_pair(const T* tile, int rows, int width,
                                             const double* coefficients, const double* others,
                                             double (&sums)[2][2]) {
  using C = ChainOf<T>;
  for (int first = 0; first < rows; first += kChain) {
    C chain[2][2];
#pragma unroll
    for (int k = 0; k < 4; ++k) chain[k / 2][k % 2] = begin_chain(sums[k / 2][k % 2], C{});
#pragma unroll 4
    for (int r = first; r < min(first + kChain, rows); ++r) {
      const C factors[2] = {static_cast<C>(__ldg(coefficients + r)),
                            static_cast<C>(__ldg(others + r))};
      float y[2];
      load_pair(tile + r * width, y);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        chain[k / 2][k % 2] =
            multiply_add(static_cast<C>(y[k % 2]), factors[k / 2], chain[k / 2][k % 2]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      sums[k / 2][k % 2] = end_chain(sums[k / 2][k % 2], chain[k / 2][k % 2]);
  }
}

// out (k, n) = coefficients (k, rows) x basis, tile by tile, two outputs at a time.
template <class T>
__global__ void __launch_bounds__(kTileThreads, 2)
    combine_kernel(Matrix<T> basis, const double* coefficients, int64_t k, float* out,
                   int64_t out_stride, int64_t n, int width, bool vectors) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* tile = reinterpret_cast<T*>(memory);
  const int pairs = min(width / 2, kTileThreads);
  const int groups = kTileThreads / pairs, group = threadIdx.x / pairs;
  for (int64_t t = blockIdx.x; t * width < n; t += gridDim.x) {
    const int64_t begin = t * width;
    const int columns = static_cast<int>(min(static_cast<int64_t>(width), n - begin));
    load_tile(basis, begin, columns, width, vectors, tile);
    for (int c = 2 * (static_cast<int>(threadIdx.x) % pairs); c < columns; c += 2 * pairs)
      for (int64_t j = 2 * group; j < k; j += 2 * groups) {
        const double* factors = coefficients + j * basis.rows;
        const bool second = j + 1 < k;
        double sums[2][2] = {};
        combine_pair(tile + c, basis.rows, width, factors, second ? factors + basis.rows : factors,
                     sums);
#pragma unroll
        for (int q = 0; q < 4; ++q)
          if ((q < 2 || second) && c + q % 2 < columns)
            out[(j + q / 2) * out_stride + begin + c + q % 2] =
                static_cast<float>(sums[q / 2][q % 2]);
      }
    __syncthreads();
  }
}

// One row of coefficients at a time, where a tile of the basis does not fit in shared memory.
template <class T>
struct Combine {
  static constexpr int kSums = 0;
  Matrix<T> basis;
  const double* coefficients;
  float* out;

  template <int kCount>
  __device__ __forceinline__ void run(int64_t i, double (&)[1]) const {
    double sums[kCount] = {};
    add_rows<false>(basis, coefficients, i, sums);
    float x[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = static_cast<float>(sums[j]);
    store(out + i, x);
  }
};

template <class T>
void combine_of(const Basis& basis, const double* coefficients, int64_t k, float* out,
                int64_t out_stride, int64_t n, const Launch& launch) {
  if (k == 0 || n == 0) return;
  const Matrix<T> matrix = matrix_of<T>(basis, 0, basis.rows);
  const int width = tile_width(basis.rows * static_cast<int64_t>(sizeof(T)), 0);
  if (k == 1 || width == 0) {
    for (int64_t j = 0; j < k; ++j) {
      float* row = out + j * out_stride;
      stream(Combine<T>{matrix, coefficients + j * basis.rows, row}, divide_rows<T>(basis, row, n),
             nullptr, launch);
    }
    return;
  }
  const size_t shared = sizeof(T) * static_cast<size_t>(basis.rows * width);
  const int grid = grid_for((n + width - 1) / width);
  allow_shared(combine_kernel<T>, shared);
  combine_kernel<T><<<grid, kTileThreads, shared, stream_of(launch)>>>(
      matrix, coefficients, k, out, out_stride, n, width, aligned(matrix));
  check(cudaGetLastError(), "combine_kernel");
}

}  // namespace

void project(const Basis& basis, const float* w, int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  const auto run = basis.dtype == Dtype::kBFloat16 ? project_of<bf16> : project_of<float>;
  run(basis, w, owned, out, launch);
}

void subtract(const Basis& basis, float* w, const double* coefficients, int64_t n, int64_t owned,
              double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  const auto run = basis.dtype == Dtype::kBFloat16 ? subtract_of<bf16> : subtract_of<float>;
  run(basis, w, coefficients, n, owned, out, launch);
}

void subtract_project(const Basis& basis, float* w, const double* coefficients, int64_t n,
                      int64_t owned, double* out, const Launch& launch) {
  const OnDevice guard(launch.device);
  const auto run =
      basis.dtype == Dtype::kBFloat16 ? subtract_project_of<bf16> : subtract_project_of<float>;
  run(basis, w, coefficients, n, owned, out, launch);
}

void combine(const Basis& basis, const double* coefficients, int64_t k, float* out,
             int64_t out_stride, int64_t n, const Launch& launch) {
  const OnDevice guard(launch.device);
  const auto run = basis.dtype == Dtype::kBFloat16 ? combine_of<bf16> : combine_of<float>;
  run(basis, coefficients, k, out, out_stride, n, launch);
}

}  // namespace cuda
}  // namespace ds_hessian
