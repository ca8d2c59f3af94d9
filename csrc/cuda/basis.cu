// Products with a basis: project, subtract, both fused, and linear combinations.
//
// The fused kernels keep a tile of columns, all rows of it, in shared memory between its two uses,
// so that the basis is read from memory once. Two blocks share a multiprocessor: one computes while
// the other waits for its tile.
#include <cuda_pipeline.h>

#include "common.cuh"

namespace ds_hessian {
namespace cuda {
namespace {

constexpr int kRowGroup = 8;       // rows whose sums a thread holds in registers
constexpr int kMaxRows = 512;      // rows per launch: bounds shared memory and registers
constexpr int kTileThreads = 512;  // of a block of the fused kernels
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kWarps = kThreads / 32;

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

// Adds the products of rows [first, first + kRowGroup) with w over columns [begin, end) to the
// slots of this warp. kCount == kVector needs everything aligned to 16 bytes.
template <int kCount, class T>
__device__ __forceinline__ void project_group(const Matrix<T>& basis, int first, const float* w,
                                              int64_t begin, int64_t end, double* slots) {
  double sums[kRowGroup] = {};
  const int rows = min(kRowGroup, basis.rows - first);
  int64_t i = begin + static_cast<int64_t>(threadIdx.x) * kCount;
  for (; i + kCount <= end; i += kThreads * kCount) {
    float x[kCount];
    load(w + i, x);
#pragma unroll
    for (int r = 0; r < kRowGroup; ++r) {
      if (r >= rows) continue;
      float y[kCount];
      load(basis.row(first + r) + i, y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[r] = fma(y[j], static_cast<double>(x[j]), sums[r]);
    }
  }
  for (; i < end; ++i)  // at most one thread has such a rest
    for (int r = 0; r < rows; ++r) {
      const double y = decode(basis.row(first + r)[i]);
      sums[r] = fma(y, static_cast<double>(w[i]), sums[r]);
    }
#pragma unroll
  for (int r = 0; r < kRowGroup; ++r) {
    if (r >= rows) continue;
    const double total = warp_sum(sums[r]);
    if (threadIdx.x % 32 == 0) slots[first + r] += total;
  }
}

// partials[block * count + r] = the products of this block's tiles. The tile of w stays in the
// caches while the groups of rows pass by.
template <bool kAligned, class T>
__global__ void __launch_bounds__(kThreads)
    project_kernel(Matrix<T> basis, const float* w, int64_t owned, int64_t width,
                   double* partials) {
  extern __shared__ double slots[];  // (kWarps, rows)
  const int rows = basis.rows;
  for (int k = threadIdx.x; k < kWarps * rows; k += kThreads) slots[k] = 0.0;
  __syncthreads();
  double* mine = slots + threadIdx.x / 32 * rows;
  for (int64_t tile = blockIdx.x; tile * width < owned; tile += gridDim.x) {
    const int64_t begin = tile * width, end = min(begin + width, owned);
    for (int first = 0; first < rows; first += kRowGroup)
      project_group<kAligned ? kVector : 1>(basis, first, w, begin, end, mine);
  }
  __syncthreads();
  for (int r = threadIdx.x; r < rows; r += kThreads) {
    double total = 0.0;
    for (int warp = 0; warp < kWarps; ++warp) total += slots[warp * rows + r];
    partials[static_cast<int64_t>(blockIdx.x) * rows + r] = total;
  }
}

template <class T>
void project_of(const Basis& basis, const float* w, int64_t owned, double* out,
                const Launch& launch) {
  const int resident = sm_count(launch.device) * 4;
  // Enough tiles for every block, none so wide that w drops out of the caches.
  const int64_t even = (owned + resident - 1) / resident;
  const int64_t width =
      std::min<int64_t>(16384, std::max<int64_t>(2048, (even + 2047) / 2048 * 2048));
  const int64_t tiles = (owned + width - 1) / width;
  const int grid = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(tiles, resident)));
  for (int64_t first = 0; first < basis.rows; first += kMaxRows) {
    const int64_t rows = std::min<int64_t>(kMaxRows, basis.rows - first);
    const Matrix<T> part = matrix_of<T>(basis, first, rows);
    const size_t shared = static_cast<size_t>(rows) * kWarps * sizeof(double);  // at most 32 KB
    const bool vectors = aligned(part) && reinterpret_cast<uintptr_t>(w) % 16 == 0;
    const auto kernel = vectors ? project_kernel<true, T> : project_kernel<false, T>;
    kernel<<<grid, kThreads, shared, stream_of(launch)>>>(part, w, owned, width, launch.workspace);
    check(cudaGetLastError(), "project_kernel");
    finish(launch, grid, rows, out + first, false);
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
#pragma unroll 4
    for (int r = 0; r < basis.rows; ++r) {
      const double c = -__ldg(coefficients + r);
      float y[kCount];
      load(basis.row(r) + i, y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) updated[j] = fma(static_cast<double>(y[j]), c, updated[j]);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = static_cast<float>(updated[j]);
    store(w + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (i + j < owned) sums[0] = fma(static_cast<double>(x[j]), x[j], sums[0]);
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

// Columns [begin, begin + columns) of all rows into `tile` (rows, width). Ends with a barrier.
template <class T>
__device__ __forceinline__ void load_tile(const Matrix<T>& basis, int64_t begin, int columns,
                                          int width, bool vectors, T* tile) {
  constexpr int kPerAccess = 16 / sizeof(T);
  if (vectors && columns == width) {
    const int per_row = width / kPerAccess;
    for (int k = threadIdx.x; k < basis.rows * per_row; k += kTileThreads) {
      const int r = k / per_row, c = k % per_row * kPerAccess;
      __pipeline_memcpy_async(tile + r * width + c, basis.row(r) + begin + c, 16);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
  } else {
    for (int k = threadIdx.x; k < basis.rows * width; k += kTileThreads) {
      const int r = k / width, c = k % width;
      if (c < columns) tile[k] = basis.row(r)[begin + c];
    }
  }
  __syncthreads();
}

// w of one tile, updated; in `next` (width) as fp64. `parts` is (kTileThreads).
template <class T>
__device__ __forceinline__ void update_tile(const Matrix<T>& basis, const T* tile,
                                            const double* coefficients, float* w, int columns,
                                            int width, double* parts, double* next) {
  const int column = threadIdx.x % width, group = threadIdx.x / width;
  const int groups = kTileThreads / width;
  double part = 0.0;
  if (column < columns)
    for (int r = group; r < basis.rows; r += groups)
      part =
          fma(static_cast<double>(decode(tile[r * width + column])), __ldg(coefficients + r), part);
  parts[threadIdx.x] = part;
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < columns) {
    double total = 0.0;
    for (int g = 0; g < groups; ++g) total += parts[g * width + threadIdx.x];
    const float updated = static_cast<float>(static_cast<double>(w[threadIdx.x]) - total);
    w[threadIdx.x] = updated;
    next[threadIdx.x] = updated;
  }
  __syncthreads();
}

// Warp k forms the products of rows k, k + kTileWarps, ... of each tile; a lane keeps its share of
// them in registers until the last tile. partials[block * rows + ...].
template <int kRowsPerWarp, class T>
__global__ void __launch_bounds__(kTileThreads)
    fused_kernel(Matrix<T> basis, float* w, const double* coefficients, int64_t n, int64_t owned,
                 int width, bool vectors, double* partials) {
  extern __shared__ __align__(16) unsigned char memory[];
  double* parts = reinterpret_cast<double*>(memory);
  double* next = parts + kTileThreads;
  T* tile = reinterpret_cast<T*>(next + kTileThreads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double sums[kRowsPerWarp] = {};
  for (int64_t k = blockIdx.x; k * width < n; k += gridDim.x) {
    const int64_t begin = k * width;
    const int columns = static_cast<int>(min(static_cast<int64_t>(width), n - begin));
    load_tile(basis, begin, columns, width, vectors, tile);
    update_tile(basis, tile, coefficients, w + begin, columns, width, parts, next);
    const int counted = static_cast<int>(
        max(static_cast<int64_t>(0), min(static_cast<int64_t>(columns), owned - begin)));
    for (int c = lane; c < counted; c += 32) {
      const double x = next[c];
#pragma unroll
      for (int q = 0; q < kRowsPerWarp; ++q) {
        const int r = warp + q * kTileWarps;
        if (r < basis.rows)
          sums[q] = fma(static_cast<double>(decode(tile[r * width + c])), x, sums[q]);
      }
    }
    __syncthreads();  // before the tile is overwritten
  }
  double* mine = partials + static_cast<int64_t>(blockIdx.x) * basis.rows;
#pragma unroll
  for (int q = 0; q < kRowsPerWarp; ++q) {
    const int r = warp + q * kTileWarps;
    if (r >= basis.rows) continue;
    const double total = warp_sum(sums[q]);
    if (lane == 0) mine[r] = total;
  }
}

// How wide a tile may be so that two blocks share a multiprocessor (or one, where it must be):
// a power of two within [32, kTileThreads], or 0 if not even 32 columns of all rows fit.
int tile_width(int64_t row_bytes_per_column, int64_t fixed, int device) {
  const int64_t reserved = 1024;  // of each block, by the system
  const int64_t half =
      attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / 2 - reserved;
  const int64_t whole = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const auto fits = [&](int64_t width, int64_t room) {
    return fixed + width * row_bytes_per_column <= room;
  };
  for (int width = kTileThreads; width >= 32; width /= 2)
    if (fits(width, std::min(half, whole))) return width;
  return fits(32, whole) ? 32 : 0;
}

template <class Kernel>
int prepare(Kernel kernel, size_t shared, int64_t tiles, int device) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared)),
        "cudaFuncSetAttribute");
  int per_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kTileThreads, shared),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const int64_t resident =
      static_cast<int64_t>(sm_count(device)) * std::max(1, std::min(per_sm, kBlocksPerSm));
  return static_cast<int>(std::max<int64_t>(1, std::min(tiles, resident)));
}

template <class T>
void subtract_project_of(const Basis& basis, float* w, const double* coefficients, int64_t n,
                         int64_t owned, double* out, const Launch& launch) {
  const int64_t fixed = 2 * kTileThreads * sizeof(double);
  const int width = tile_width(basis.rows * static_cast<int64_t>(sizeof(T)), fixed, launch.device);
  if (basis.rows == 0 || basis.rows > kMaxRows ||
      width == 0) {  // the tile does not fit: two passes
    subtract_of<T>(basis, w, coefficients, n, owned, nullptr, launch);
    project_of<T>(basis, w, owned, out, launch);
    return;
  }
  const Matrix<T> matrix = matrix_of<T>(basis, 0, basis.rows);
  const int per_warp = (matrix.rows + kTileWarps - 1) / kTileWarps;
  const auto kernel = per_warp <= 4    ? fused_kernel<4, T>
                      : per_warp <= 8  ? fused_kernel<8, T>
                      : per_warp <= 16 ? fused_kernel<16, T>
                                       : fused_kernel<32, T>;
  const size_t shared =
      static_cast<size_t>(fixed) + sizeof(T) * static_cast<size_t>(basis.rows * width);
  const int grid = prepare(kernel, shared, (n + width - 1) / width, launch.device);
  kernel<<<grid, kTileThreads, shared, stream_of(launch)>>>(
      matrix, w, coefficients, n, owned, width, aligned(matrix), launch.workspace);
  check(cudaGetLastError(), "fused_kernel");
  finish(launch, grid, basis.rows, out, false);
}

// out (k, n) = coefficients (k, rows) x basis, tile by tile.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    combine_kernel(Matrix<T> basis, const double* coefficients, int64_t coefficient_stride,
                   int64_t k, float* out, int64_t out_stride, int64_t n, int width, bool vectors) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* tile = reinterpret_cast<T*>(memory);
  const int column = threadIdx.x % width, group = threadIdx.x / width;
  const int groups = kTileThreads / width;
  for (int64_t t = blockIdx.x; t * width < n; t += gridDim.x) {
    const int64_t begin = t * width;
    const int columns = static_cast<int>(min(static_cast<int64_t>(width), n - begin));
    load_tile(basis, begin, columns, width, vectors, tile);
    if (column < columns)
      for (int64_t j = group; j < k; j += groups) {
        const double* c = coefficients + j * coefficient_stride;
        double sum = 0.0;
        for (int r = 0; r < basis.rows; ++r)
          sum = fma(static_cast<double>(decode(tile[r * width + column])), __ldg(c + r), sum);
        out[j * out_stride + begin + column] = static_cast<float>(sum);
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
#pragma unroll 4
    for (int r = 0; r < basis.rows; ++r) {
      const double c = __ldg(coefficients + r);
      float y[kCount];
      load(basis.row(r) + i, y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j] = fma(static_cast<double>(y[j]), c, sums[j]);
    }
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
  const int width = tile_width(basis.rows * static_cast<int64_t>(sizeof(T)), 0, launch.device);
  if (k == 1 || width == 0) {
    for (int64_t j = 0; j < k; ++j) {
      float* row = out + j * out_stride;
      stream(Combine<T>{matrix, coefficients + j * basis.rows, row}, divide_rows<T>(basis, row, n),
             nullptr, launch);
    }
    return;
  }
  const size_t shared = sizeof(T) * static_cast<size_t>(basis.rows * width);
  const int grid = prepare(combine_kernel<T>, shared, (n + width - 1) / width, launch.device);
  combine_kernel<T><<<grid, kTileThreads, shared, stream_of(launch)>>>(
      matrix, coefficients, basis.rows, k, out, out_stride, n, width, aligned(matrix));
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
