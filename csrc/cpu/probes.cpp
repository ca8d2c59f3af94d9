// Counter-based Gaussian and Rademacher variates over a contiguous range of indices.
#include <cstring>

#include "../contracts.h"
#include "../probe_math.h"
#include "parallel.h"
#include "philox.h"

namespace ds_hessian {
namespace cpu {
namespace {

constexpr int64_t kGroup = 64;  // Philox blocks at a time: the loops below become vector code
constexpr int64_t kWords = 4 * kGroup;

struct Gaussian {
  static constexpr int64_t kPerBlock = 4;

  static void fill(const uint32_t* words, float* values) {
    constexpr int64_t kPairs = kWords / 2;
    uint32_t radius[kPairs], angle[kPairs];
    float cosine[kPairs], sine[kPairs];
    for (int64_t i = 0; i < kPairs; ++i) {
      radius[i] = words[2 * i];
      angle[i] = words[2 * i + 1];
    }
    for (int64_t i = 0; i < kPairs; ++i)
      probe::gaussian_pair(radius[i], angle[i], &cosine[i], &sine[i]);
    for (int64_t i = 0; i < kPairs; ++i) {
      values[2 * i] = cosine[i];
      values[2 * i + 1] = sine[i];
    }
  }
};

struct Rademacher {
  static constexpr int64_t kPerBlock = 128;

  static void fill(const uint32_t* words, float* values) {
    for (int64_t i = 0; i < kWords; ++i)
      for (uint32_t bit = 0; bit < 32; ++bit) {
        const uint32_t raw = 0x3F800000u | ((words[i] >> bit) & 1u) << 31;  // +1 or -1
        memcpy(values + 32 * i + bit, &raw, sizeof raw);
      }
  }
};

// Groups of Philox blocks start at multiples of their size, whatever the range, so every range
// sees the same groups; only the part of a group inside the range is copied out.
template <class Kind>
void fill_range(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start, int threads) {
  constexpr int64_t kValues = kGroup * Kind::kPerBlock;
  const philox::Stream random(key, stream);
  parallel::blocks(n, threads, [&](int64_t, int64_t begin, int64_t end) {
    uint32_t words[kWords];
    float values[kValues];
    for (int64_t i = begin; i < end;) {
      const int64_t inside = (start + i) % kValues;
      const int64_t count = std::min(kValues - inside, end - i);
      const uint64_t block = static_cast<uint64_t>((start + i - inside) / Kind::kPerBlock);
      for (uint64_t b = 0; b < kGroup; b += philox::kBlocks) random.draw(block + b, words + 4 * b);
      Kind::fill(words, values);
      memcpy(out + i, values + inside, static_cast<size_t>(count) * sizeof(float));
      i += count;
    }
  });
}

}  // namespace

void gaussian(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
              const Launch& launch) {
  fill_range<Gaussian>(out, n, key, stream, start, launch.threads);
}

void rademacher(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
                const Launch& launch) {
  fill_range<Rademacher>(out, n, key, stream, start, launch.threads);
}

}  // namespace cpu
}  // namespace ds_hessian
