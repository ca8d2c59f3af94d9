// Philox4x32-10 (csrc/probe_math.h) with eight blocks at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace ds_hessian {
namespace philox {

constexpr int64_t kBlocks = 8;

// Four 32-bit words, each in the low half of its lane; what a high half holds is of no account.
typedef uint64_t W4 __attribute__((vector_size(32)));

// The 64-bit products of four words with `factor`.
DS_HESSIAN_LANE W4 multiply(W4 words, uint64_t factor) {
#if defined(__AVX2__)
  return (W4)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi64x(static_cast<int64_t>(factor)));
#else
  return (words & 0xFFFFFFFFu) * factor;
#endif
}

// The random words of one stream under one key.
class Stream {
 public:
  Stream(uint64_t key, uint64_t stream) : stream_(stream) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int i = 0; i < kRounds; ++i, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      k0_[i] = W4{} + k0;
      k1_[i] = W4{} + k1;
    }
  }

  // The 32 words of blocks `first` to `first` + 7, in their order.
  DS_HESSIAN_LANE void draw(uint64_t first, void* to) const {
    Four low(stream_, first), high(stream_, first + 4);  // two chains of products run side by side
    for (int i = 0; i < kRounds; ++i) {
      low.round(k0_[i], k1_[i]);
      high.round(k0_[i], k1_[i]);
    }
    low.store(to);
    high.store(static_cast<char*>(to) + 64);
  }

 private:
  static constexpr int kRounds = 10;

  // The counters of four blocks, which become their words.
  struct Four {
    W4 c0, c1, c2, c3;

    DS_HESSIAN_LANE Four(uint64_t stream, uint64_t block) {
      c0 = W4{0, 1, 2, 3} + block;
      c1 = c0 >> 32;
      c2 = W4{} + stream;
      c3 = c2 >> 32;
    }

    DS_HESSIAN_LANE void round(W4 k0, W4 k1) {
      const W4 first = multiply(c0, 0xD2511F53u), second = multiply(c2, 0xCD9E8D57u);
      c0 = (second >> 32) ^ (c1 ^ k0);
      c1 = second;
      c2 = (first >> 32) ^ (c3 ^ k1);
      c3 = first;
    }

    DS_HESSIAN_LANE void store(void* to) const {
      const W4 x01 = (c0 & 0xFFFFFFFFu) | c1 << 32, x23 = (c2 & 0xFFFFFFFFu) | c3 << 32;
      const W4 low = {x01[0], x23[0], x01[1], x23[1]}, high = {x01[2], x23[2], x01[3], x23[3]};
      memcpy(to, &low, sizeof low);
      memcpy(static_cast<char*>(to) + 32, &high, sizeof high);
    }
  };

  const uint64_t stream_;
  W4 k0_[kRounds], k1_[kRounds];
};

}  // namespace philox
}  // namespace ds_hessian
