// Counter-based Gaussian and Rademacher variates over a contiguous range of indices.
#include "common.cuh"

namespace ds_hessian {
namespace cuda {
namespace {

// The variates number 4 block .. 4 block + 3.
struct Gaussian {
  __device__ __forceinline__ void operator()(uint64_t key, uint64_t stream, int64_t block,
                                             float (&x)[4]) const {
    const probe::Words words = probe::philox(key, stream, static_cast<uint64_t>(block));
    probe::gaussian_pair(words.x0, words.x1, &x[0], &x[1]);
    probe::gaussian_pair(words.x2, words.x3, &x[2], &x[3]);
  }
};

struct Rademacher {
  __device__ __forceinline__ void operator()(uint64_t key, uint64_t stream, int64_t block,
                                             float (&x)[4]) const {
    // A Philox block holds 128 signs: 32 threads each make it anew, which is cheaper than sharing.
    const probe::Words words = probe::philox(key, stream, static_cast<uint64_t>(block >> 5));
    const int which = static_cast<int>(block >> 3) & 3;
    const uint32_t word = which == 0   ? words.x0
                          : which == 1 ? words.x1
                          : which == 2 ? words.x2
                                       : words.x3;
    const int shift = static_cast<int>(block & 7) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      x[j] = __uint_as_float(0x3F800000u | ((word >> (shift + j)) & 1u) << 31);
  }
};

// A thread writes the four variates of one group; groups start at multiples of four, whatever
// `start` is. `aligned`: whole groups are aligned to 16 bytes.
template <class Kind>
__global__ void __launch_bounds__(kThreads)
    fill_kernel(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start, bool aligned) {
  const int64_t first = start >> 2, last = (start + n + 3) >> 2;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t block = first + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; block < last; block += stride) {
    float x[4];
    Kind()(key, stream, block, x);
    const int64_t at = 4 * block - start;
    if (aligned && at >= 0 && at + 4 <= n) {
      __stcg(reinterpret_cast<float4*>(out + at), make_float4(x[0], x[1], x[2], x[3]));
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (at + j >= 0 && at + j < n) out[at + j] = x[j];
  }
}

template <class Kind>
void fill(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
          const Launch& launch) {
  if (n == 0) return;
  const OnDevice guard(launch.device);
  const uintptr_t origin = reinterpret_cast<uintptr_t>(out) - static_cast<uintptr_t>(start) * 4;
  const int grid = grid_for(blocks_for((n + 3) / 4 + 1));
  fill_kernel<Kind>
      <<<grid, kThreads, 0, stream_of(launch)>>>(out, n, key, stream, start, origin % 16 == 0);
  check(cudaGetLastError(), "fill_kernel");
}

}  // namespace

void gaussian(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
              const Launch& launch) {
  fill<Gaussian>(out, n, key, stream, start, launch);
}

void rademacher(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
                const Launch& launch) {
  fill<Rademacher>(out, n, key, stream, start, launch);
}

}  // namespace cuda
}  // namespace ds_hessian
