// A sum of x' x, of which one triangle is formed: torch has no such product.
#include <algorithm>
#include <cstring>
#include <memory>

#include "lanes.h"
#include "parallel.h"

namespace ds_hessian {
namespace cpu {
namespace {

// The sums of kRows x kVectors vectors stay in registers, with one row's operands beside them. Each
// is a chain over the tokens, so that the bits do not depend on the length of a vector.
#if defined(__AVX512F__)
typedef float Lanes __attribute__((vector_size(64)));
constexpr int kRows = 8;

DS_HESSIAN_LANE Lanes add_product(Lanes sum, float a, Lanes b) {
  return (Lanes)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)sum);
}
#else
typedef lanes::F8 Lanes;
constexpr int kRows = 4;

DS_HESSIAN_LANE Lanes add_product(Lanes sum, float a, Lanes b) {
  return lanes::add_product(sum, Lanes{a, a, a, a, a, a, a, a}, b);
}
#endif
constexpr int kVectors = 3;
constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
constexpr int64_t kPanel = kVectors * kLanes;  // columns that are packed, and summed up, together
constexpr int64_t kTokens = 256;               // a packed panel stays in a second-level cache
static_assert(kPanel % kRows == 0 && 48 % kPanel == 0, "a tile is within a panel, that in a piece");

// Columns `begin` to `end` of some tokens, kPanel for each token, the last ones 0.
void pack(const Matrix& x, int64_t first, int64_t tokens, int64_t begin, int64_t end, float* to) {
  const int64_t width = end - begin;
  for (int64_t t = 0; t < tokens; ++t, to += kPanel) {
    const float* from = x.data + (first + t) * x.row_stride + begin * x.column_stride;
    if (x.column_stride == 1) {
      memcpy(to, from, static_cast<size_t>(width) * sizeof(float));
    } else {
      for (int64_t i = 0; i < width; ++i) to[i] = from[i * x.column_stride];
    }
    std::fill(to + width, to + kPanel, 0.0f);
  }
}

// out (rows, columns) += alpha a' b over some tokens, a and b within packed panels.
void add_tile(const float* a, const float* b, int64_t tokens, float alpha, float* out,
              int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i)  // there by the time that they are added to
    for (int64_t j = 0; j < columns; j += 16) __builtin_prefetch(out + i * stride + j, 1);
  Lanes sums[kRows][kVectors] = {};
  for (int64_t t = 0; t < tokens; ++t, a += kPanel, b += kPanel) {
    Lanes right[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) memcpy(&right[j], b + j * kLanes, sizeof(Lanes));
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sums[i][j] = add_product(sums[i][j], a[i], right[j]);
  }
  float found[kRows][kPanel];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) memcpy(&found[i][j * kLanes], &sums[i][j], sizeof(Lanes));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[i * stride + j] += alpha * found[i][j];
}

}  // namespace

void add_square(float* pieces, int64_t piece, const Matrix& x, float alpha, const Launch& launch) {
  const int64_t n = x.columns, panels = (n + kPanel - 1) / kPanel;
  std::unique_ptr<float[]> packed(new float[static_cast<size_t>(panels * kPanel * kTokens)]);
  for (int64_t first = 0; first < x.rows; first += kTokens) {
    const int64_t tokens = std::min(kTokens, x.rows - first), size = tokens * kPanel;
    parallel::run(panels, launch.threads, [&](int64_t panel) {
      const int64_t begin = panel * kPanel;
      pack(x, first, tokens, begin, std::min(n, begin + kPanel), packed.get() + panel * size);
    });
    parallel::run(panels, launch.threads, [&](int64_t panel) {
      // Its piece has rows and columns from `start` on, and earlier pieces before it.
      const int64_t j = panel * kPanel, start = j / piece * piece;
      const int64_t width = std::min(piece, n - start), columns = std::min(kPanel, n - j);
      float* out = pieces + start * n - start * (start - piece) / 2;
      const float* right = packed.get() + panel * size;
      for (int64_t i = j; i < n; i += kRows)
        add_tile(packed.get() + i / kPanel * size + i % kPanel, right, tokens, alpha,
                 out + (i - start) * width + (j - start), width, std::min<int64_t>(kRows, n - i),
                 columns);
    });
  }
}

}  // namespace cpu
}  // namespace ds_hessian
