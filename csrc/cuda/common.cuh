// What the CUDA kernels share: element access, grids, and sums in a fixed order.
//
// A sum is formed in two stages without atomics: every thread adds up its elements, in chains of at
// most 512 that a compensated sum collects, so that the error does not grow with the length; a
// block adds up its threads by a fixed tree into `workspace`, and a second kernel the blocks, in
// order. Grids and tiles follow from the lengths alone, not from the device: the bits are the same
// on every run and on every GPU.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../contracts.h"
#include "../probe_math.h"

namespace ds_hessian {
namespace cuda {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements of a vector access: 16 bytes of a 16-bit type

// Blocks of kThreads that share a multiprocessor, at least: 80 registers a thread. Without a bound
// the compiler spills to make room for more blocks; the loads that three of them have in flight
// cover the latency of memory.
constexpr int kResident = 3;

// Blocks of a grid, at most: two to five times what an H100 holds of them, by their registers, so
// that few of its multiprocessors wait for a last block, and few enough that their partial sums are
// nothing beside a vector.
#ifndef DS_HESSIAN_MAX_BLOCKS
#define DS_HESSIAN_MAX_BLOCKS 2048
#endif
constexpr int kMaxBlocks = DS_HESSIAN_MAX_BLOCKS;

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes the device of a call current, and the caller's again afterwards.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline cudaStream_t stream_of(const Launch& launch) {
  return static_cast<cudaStream_t>(launch.stream);
}

// A grid for `wanted` blocks, each of which goes on where more are wanted.
inline int grid_for(int64_t wanted) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(wanted, kMaxBlocks)));
}

// Blocks for `items` units of work of one thread each.
inline int64_t blocks_for(int64_t items) { return (items + kThreads - 1) / kThreads; }

__device__ __forceinline__ float decode(float x) { return x; }
__device__ __forceinline__ float decode(bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float decode(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <class T>
__device__ __forceinline__ T encode(float x);
template <>
__device__ __forceinline__ float encode<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 encode<bf16>(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>(0x7FC0u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
__device__ __forceinline__ fp16 encode<fp16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}

// kCount elements at `from`; with kCount == kVector, `from` is aligned to 16 bytes.
template <int kCount, class T>
__device__ __forceinline__ void load(const T* from, float (&x)[kCount]) {
  if (kCount == kVector) {
    union {
      uint4 words[sizeof(T) * kVector / 16];
      T elements[kVector];
    } data;
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(data) / 16); ++k)
      data.words[k] = reinterpret_cast<const uint4*>(from)[k];
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = decode(data.elements[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = decode(from[j]);
  }
}

// Stores x rounded to T, and leaves in x what was stored. Whole words by __stcg: the compiler
// splits a plain store through the union into one for each element.
template <int kCount, class T>
__device__ __forceinline__ void store(T* to, float (&x)[kCount]) {
  if (kCount == kVector) {
    union {
      uint4 words[sizeof(T) * kVector / 16];
      T elements[kVector];
    } data;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      data.elements[j] = encode<T>(x[j]);
      x[j] = decode(data.elements[j]);
    }
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(data) / 16); ++k)
      __stcg(reinterpret_cast<uint4*>(to) + k, data.words[k]);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const T stored = encode<T>(x[j]);
      to[j] = stored;
      x[j] = decode(stored);
    }
  }
}

// An operand of a streaming kernel, for the choice of vector accesses.
struct Operand {
  const void* address;
  int64_t size;        // bytes of an element
  int64_t stride = 0;  // elements between rows, if it has several
};

// How [0, n) is divided: `head` single elements, `vectors` groups of kVector, the rest single.
struct Division {
  int64_t n, head, vectors;

  __host__ __device__ int64_t singles() const { return n - vectors * kVector; }
};

// The head after which all operands are aligned to 16 bytes; no vectors if there is none.
inline Division divide(int64_t n, const std::vector<Operand>& operands) {
  for (int64_t head = 0; head < kVector && head <= n; ++head) {
    bool aligned = true;
    for (const Operand& x : operands) {
      if (x.address == nullptr) continue;
      const uintptr_t first = reinterpret_cast<uintptr_t>(x.address) + head * x.size;
      aligned = aligned && first % 16 == 0 && (x.stride * x.size) % 16 == 0;
    }
    if (aligned) return {n, head, (n - head) / kVector};
  }
  return {n, 0, 0};
}

// Neumaier's sum: its error does not grow with the number of terms.
struct Compensated {
  double sum, lost;

  __device__ __forceinline__ void add(double x) {
    const double total = sum + x;
    lost += fabs(sum) >= fabs(x) ? (sum - total) + x : (x - total) + sum;
    sum = total;
  }
  // `lost` is NaN once a term is not finite; the plain sum then says which of Inf and NaN it is.
  __device__ __forceinline__ double value() const {
    return fabs(sum) <= 1.7976931348623157e308 ? sum + lost : sum;
  }
};

constexpr int kChainLength = 512;  // additions to a plain fp64 sum between two compensated ones

// The sums of one thread of a streaming kernel.
template <int kSums>
struct ThreadSums {
  double plain[kSums] = {};
  Compensated total[kSums] = {};
  int terms = 0;

  // To be called after every vector.
  __device__ __forceinline__ void step() {
    if (++terms < kChainLength / kVector) return;
    collect();
    terms = 0;
  }
  __device__ __forceinline__ void collect() {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      total[s].add(plain[s]);
      plain[s] = 0.0;
    }
  }
  // The sums, in `plain`.
  __device__ __forceinline__ void close() {
    collect();
#pragma unroll
    for (int s = 0; s < kSums; ++s) plain[s] = total[s].value();
  }
};

// The sum of x over the lanes of a warp, in lane 0.
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_down_sync(0xFFFFFFFFu, x, step);
  return x;
}

// to[s] = the sum of sums[s] over the threads of a block of kSize threads.
template <int kSize, int kSums>
__device__ void block_sums(const double (&sums)[kSums], double* to) {
  __shared__ double shared[kSize / 32][kSums];
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const double total = warp_sum(sums[s]);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][s] = total;
  }
  __syncthreads();
  if (threadIdx.x < kSums) {
    double total = 0.0;
    for (int warp = 0; warp < kSize / 32; ++warp) total += shared[warp][threadIdx.x];
    to[threadIdx.x] = total;
  }
}

// out[s] = the sum of partials[block * count + s] over `blocks`, added to out[s] if `more`.
static __global__ void __launch_bounds__(kThreads)
    finish_kernel(const double* partials, int blocks, int64_t count, double* out, bool more) {
  double sum[1] = {0.0};
  for (int block = threadIdx.x; block < blocks; block += kThreads)
    sum[0] += partials[block * count + blockIdx.x];
  __shared__ double total[1];
  block_sums<kThreads>(sum, total);
  if (threadIdx.x == 0) out[blockIdx.x] = more ? out[blockIdx.x] + total[0] : total[0];
}

inline void finish(const Launch& launch, int blocks, int64_t count, double* out, bool more) {
  if (count == 0) return;
  finish_kernel<<<static_cast<unsigned>(count), kThreads, 0, stream_of(launch)>>>(
      launch.workspace, blocks, count, out, more);
  check(cudaGetLastError(), "finish_kernel");
}

// body.run<kCount>(i, sums) for all elements of a division that fall to this thread of block
// `turn`.
template <class Body, class Sums>
__device__ __forceinline__ void run_division(const Body& body, const Division& division,
                                             unsigned turn, Sums& sums) {
  const int64_t first = static_cast<int64_t>(turn) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t k = first; k < division.vectors; k += stride) {
    body.template run<kVector>(division.head + k * kVector, sums.plain);
    sums.step();
  }
  for (int64_t k = first; k < division.singles(); k += stride) {
    body.template run<1>(k < division.head ? k : k + division.vectors * kVector, sums.plain);
    sums.step();
  }
}

// A streaming kernel: all elements, then the sums of the block. A Body has kSums and handles kCount
// elements from i on. Operands of four products do not fit into the registers of kResident blocks.
template <class Body>
__global__ void __launch_bounds__(kThreads, Body::kSums < 4 ? kResident : 2)
    stream_kernel(Body body, Division division, double* partials) {
  ThreadSums<(Body::kSums > 0 ? Body::kSums : 1)> sums;
  run_division(body, division, blockIdx.x, sums);
  if (Body::kSums == 0) return;
  sums.close();
  block_sums<kThreads>(sums.plain, partials + blockIdx.x * int64_t{Body::kSums});
}

// Runs a streaming kernel on the launch's stream; out, where it is not null, receives its sums.
template <class Body>
void stream(const Body& body, const Division& division, double* out, const Launch& launch) {
  const int64_t items = std::max(division.vectors, division.singles());
  const int grid = grid_for(blocks_for(items));
  stream_kernel<<<grid, kThreads, 0, stream_of(launch)>>>(body, division, launch.workspace);
  check(cudaGetLastError(), "stream_kernel");
  if (Body::kSums > 0 && out != nullptr) finish(launch, grid, Body::kSums, out, false);
}

}  // namespace cuda
}  // namespace ds_hessian
