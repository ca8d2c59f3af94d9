// Counter-based Gaussian and Rademacher variates over a contiguous range of indices.
#include <cstring>

#include "../contracts.h"
#include "../probe_math.h"
#include "parallel.h"

namespace ds_hessian {
namespace cpu {
namespace {

constexpr int64_t kGroup = 64;  // Philox blocks at a time: the loops below become vector code

struct WordTable {
  uint32_t x0[kGroup], x1[kGroup], x2[kGroup], x3[kGroup];
};

void fill_words(uint64_t key, uint64_t stream, int64_t first, WordTable* table) {
  for (int64_t i = 0; i < kGroup; ++i) {
    const probe::Words words = probe::philox(key, stream, static_cast<uint64_t>(first + i));
    table->x0[i] = words.x0;
    table->x1[i] = words.x1;
    table->x2[i] = words.x2;
    table->x3[i] = words.x3;
  }
}

struct Gaussian {
  static constexpr int64_t kPerBlock = 4;

  static void fill(const WordTable& table, float* values) {
    float z0[kGroup], z1[kGroup], z2[kGroup], z3[kGroup];
    for (int64_t i = 0; i < kGroup; ++i)
      probe::gaussian_pair(table.x0[i], table.x1[i], &z0[i], &z1[i]);
    for (int64_t i = 0; i < kGroup; ++i)
      probe::gaussian_pair(table.x2[i], table.x3[i], &z2[i], &z3[i]);
    for (int64_t i = 0; i < kGroup; ++i) {
      values[4 * i] = z0[i];
      values[4 * i + 1] = z1[i];
      values[4 * i + 2] = z2[i];
      values[4 * i + 3] = z3[i];
    }
  }
};

struct Rademacher {
  static constexpr int64_t kPerBlock = 128;

  static void spread(uint32_t word, float* values) {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      const uint32_t raw = 0x3F800000u | ((word >> bit) & 1u) << 31;  // +1 or -1
      memcpy(values + bit, &raw, sizeof raw);
    }
  }

  static void fill(const WordTable& table, float* values) {
    for (int64_t i = 0; i < kGroup; ++i) {
      spread(table.x0[i], values + 128 * i);
      spread(table.x1[i], values + 128 * i + 32);
      spread(table.x2[i], values + 128 * i + 64);
      spread(table.x3[i], values + 128 * i + 96);
    }
  }
};

// Groups of Philox blocks start at multiples of their size, whatever the range, so every range
// sees the same groups; only the part of a group inside the range is copied out.
template <class Kind>
void fill_range(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start, int threads) {
  constexpr int64_t kValues = kGroup * Kind::kPerBlock;
  parallel::blocks(n, threads, [&](int64_t, int64_t begin, int64_t end) {
    WordTable table;
    float values[kValues];
    for (int64_t i = begin; i < end;) {
      const int64_t inside = (start + i) % kValues;
      const int64_t count = std::min(kValues - inside, end - i);
      fill_words(key, stream, (start + i - inside) / Kind::kPerBlock, &table);
      Kind::fill(table, values);
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
