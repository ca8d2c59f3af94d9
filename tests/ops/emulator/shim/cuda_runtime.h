// CUDA on the CPU, for tests: enough of the CUDA C++ language and runtime that csrc/cuda/*.cu run
// as ordinary C++. One OS thread; every CUDA thread of a block is a fiber (emulator.cpp). A warp
// collective or a barrier switches fibers; misuse of one (a lane that left, divergent sites, a
// deadlock), a launch the device would refuse, and a misaligned vector access are errors.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

using std::max;
using std::min;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace cudasim {
extern dim3 thread_index, block_index, block_size, grid_size;  // of the fiber that runs

struct Site {
  const char* file;
  int line;
};

void barrier(Site site);
// All lanes of `mask` meet; returns the bits that lane `source` brought (own bits if out of range).
uint64_t exchange(unsigned mask, uint64_t bits, int source, Site site);
void* shared_static(const void* tag, size_t bytes, size_t alignment);  // a __shared__ variable
void* shared_dynamic();                                                // extern __shared__
void async_copy(void* to, const void* from, size_t bytes);  // carried out by async_wait only
void async_commit();
void async_wait(int groups_left);
[[noreturn]] void fail(const char* what, Site site);

using Thunk = void (*)(const void* closure);
void run_grid(dim3 grid, dim3 block, size_t dynamic_shared, Thunk thunk, const void* closure,
              Site site);

struct Config {
  dim3 grid, block;
  size_t shared;
  void* stream;
  Config(dim3 g, dim3 b, size_t s = 0, void* t = nullptr)
      : grid(g), block(b), shared(s), stream(t) {}
};
template <class F>
void launch(const Config& c, const F& body, Site site) {
  run_grid(
      c.grid, c.block, c.shared, [](const void* f) { (*static_cast<const F*>(f))(); }, &body, site);
}
template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, source, site);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline int lane() { return static_cast<int>(thread_index.x % 32); }
}  // namespace cudasim

#define threadIdx (cudasim::thread_index)
#define blockIdx (cudasim::block_index)
#define blockDim (cudasim::block_size)
#define gridDim (cudasim::grid_size)
#define CUDASIM_SITE (cudasim::Site{__FILE__, __LINE__})
#define __syncthreads() cudasim::barrier(CUDASIM_SITE)
#define __shfl_down_sync(mask, value, step) \
  cudasim::shuffle(mask, value, cudasim::lane() + static_cast<int>(step), CUDASIM_SITE)
#define __shfl_xor_sync(mask, value, bits) \
  cudasim::shuffle(mask, value, cudasim::lane() ^ static_cast<int>(bits), CUDASIM_SITE)
#define __shfl_sync(mask, value, source) \
  cudasim::shuffle(mask, value, static_cast<int>(source), CUDASIM_SITE)

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T value) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) cudasim::fail("misaligned store", CUDASIM_SITE);
  *p = value;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __uint_as_float(uint32_t x) {
  float y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
// Compiled with -ffp-contract=off: each operation is rounded on its own.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }

// The runtime, for one device whose size the environment sets (CUDASIM_SMS, ...): emulator.cpp.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
const char* cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
namespace cudasim {
cudaError_t set_dynamic_shared(int bytes);
int occupancy(int threads, size_t dynamic_shared);
}  // namespace cudasim
template <class F>
cudaError_t cudaFuncSetAttribute(F*, cudaFuncAttribute, int bytes) {
  return cudasim::set_dynamic_shared(bytes);
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F*, int threads,
                                                          size_t dynamic_shared) {
  *blocks = cudasim::occupancy(threads, dynamic_shared);
  return cudaSuccess;
}
