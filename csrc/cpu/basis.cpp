// Products with a basis: all rows of a tile of columns at a time, so that the basis is read once.
#include <cstring>
#include <memory>

#include "reduce.h"

namespace ds_hessian {
namespace cpu {
namespace {

using lanes::D8;
using lanes::F8;
using lanes::Full;
using lanes::widen;

// On a lambda of prefetches only: GCC drops a call that returns nothing and writes nothing.
#define DS_HESSIAN_INLINED __attribute__((always_inline))

constexpr int64_t kColumns = 2048;       // of a tile: 16 KB in fp64, half of a first-level cache
constexpr int64_t kFusedColumns = 1024;  // two such tiles and the rows at hand fill that cache
constexpr int64_t kGroup = 4;            // rows at a time: their sums stay in registers

template <class T>
const T* row_of(const Basis& basis, int64_t row) {
  return static_cast<const T*>(basis.data) + row * basis.stride;
}

DS_HESSIAN_LANE D8 load_wide(const double* from) {
  D8 wide;
  memcpy(&wide.low, from, 32);
  memcpy(&wide.high, from + 4, 32);
  return wide;
}

DS_HESSIAN_LANE void store_wide(double* to, const D8& wide) {
  memcpy(to, &wide.low, 32);
  memcpy(to + 4, &wide.high, 32);
}

// A tile in fp64, with zeros up to the next multiple of eight columns.
void widen_tile(const float* w, int64_t columns, double* wide) {
  lanes::each(0, columns, [&](int64_t i, auto io) { store_wide(wide + i, widen(io.load(w + i))); });
}

void narrow_tile(const double* wide, int64_t columns, float* w) {
  lanes::each(0, columns,
              [&](int64_t i, auto io) { io.store(w + i, lanes::narrow(load_wide(wide + i))); });
}

// Some rows of a tile, `stride` elements apart, and rows that will be wanted next (or null): they
// lie far apart, and the processor itself prefetches only along one.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  const T* ahead;
  int64_t ahead_stride;

  DS_HESSIAN_LANE Rows from(int64_t row) const {
    return {data + row * stride, stride, ahead ? ahead + row * ahead_stride : nullptr,
            ahead_stride};
  }
  template <int kRows>
  DS_HESSIAN_LANE void prefetch(int64_t i) const {
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(ahead + r * ahead_stride + i);
  }
};

// sums[r] += the product of row r with `wide`.
template <int kRows, int kAhead = kRows, class T>
void project_rows(const Rows<T>& rows, const double* wide, int64_t columns, lanes::Sum* sums) {
  D8 partial[kRows];
  for (int r = 0; r < kRows; ++r) partial[r] = lanes::zeros();
  lanes::each_ahead(
      columns, [&](int64_t i) DS_HESSIAN_INLINED { rows.template prefetch<kAhead>(i); },
      [&](int64_t i, auto io) {
        D8 x = load_wide(wide + i);
        lanes::keep(&x);  // used kRows times: the loads of the rows are what limits this loop
        for (int r = 0; r < kRows; ++r)
          partial[r] = lanes::add_product(partial[r], io.wide(rows.data + r * rows.stride + i), x);
      });
  for (int r = 0; r < kRows; ++r) sums[r].add(partial[r].total());
}

void add_square(const double* wide, int64_t columns, lanes::Sum* sum) {
  D8 square = lanes::zeros();
  for (int64_t i = 0; i < columns; i += lanes::kLanes) {
    const D8 x = load_wide(wide + i);
    square = lanes::add_product(square, x, x);
  }
  sum->add(square.total());
}

// wide -= the rows times their coefficients; `copy`, if wanted, keeps the rows side by side.
template <int kRows, bool kCopy, int kAhead = kRows, class T>
void subtract_rows(const Rows<T>& rows, const double* coefficients, double* wide, int64_t columns,
                   T* copy, int64_t copy_stride) {
  D8 factors[kRows];
  for (int r = 0; r < kRows; ++r) factors[r] = lanes::broadcast(-coefficients[r]);
  lanes::each_ahead(
      columns, [&](int64_t i) DS_HESSIAN_INLINED { rows.template prefetch<kAhead>(i); },
      [&](int64_t i, auto io) {
        D8 x = load_wide(wide + i);
        for (int r = 0; r < kRows; ++r) {
          const T* row = rows.data + r * rows.stride + i;
          x = lanes::add_product(x, io.wide(row), factors[r]);
          if (kCopy) io.put(copy + r * copy_stride + i, row);
        }
        store_wide(wide + i, x);
      });
}

// Runs some(row) for groups of kGroup rows, then one(row) for each of the rest.
template <class Some, class One>
DS_HESSIAN_LANE void grouped(int64_t rows, const Some& some, const One& one) {
  int64_t row = 0;
  for (; row + kGroup <= rows; row += kGroup) some(row);
  for (; row < rows; ++row) one(row);
}

// Runs tile(begin, end, sums) over the blocks of [0, n) in tiles of at most `width` columns on one
// side of `owned`; out receives the `count` sums of the owned tiles.
template <class Tile>
void reduce_tiles(int64_t n, int64_t owned, int64_t width, int64_t count, int threads, double* out,
                  const Tile& tile) {
  std::vector<double> partials(static_cast<size_t>(parallel::block_count(n) * count));
  parallel::blocks(n, threads, [&](int64_t block, int64_t begin, int64_t end) {
    std::vector<lanes::Sum> sums(static_cast<size_t>(count)), unused(static_cast<size_t>(count));
    for (int64_t i = begin, stop; i < end; i = stop) {
      stop = std::min(i + width, end);
      if (i < owned && owned < stop) stop = owned;
      tile(i, stop, i < owned ? sums.data() : unused.data());
    }
    for (int64_t s = 0; s < count; ++s)
      partials[static_cast<size_t>(block * count + s)] = sums[static_cast<size_t>(s)].value();
  });
  parallel::collect(partials, count, out);
}

template <class T>
void project_of(const Basis& basis, const float* w, int64_t owned, double* out, int threads) {
  reduce_tiles(
      owned, owned, kColumns, basis.rows, threads, out,
      [&](int64_t begin, int64_t end, lanes::Sum* sums) {
        alignas(64) double wide[kColumns];
        const int64_t columns = end - begin;
        const T* tile = row_of<T>(basis, 0) + begin;
        const Rows<T> rows = {tile, basis.stride, tile + kGroup * basis.stride, basis.stride};
        widen_tile(w + begin, columns, wide);
        grouped(
            basis.rows,
            [&](int64_t row) { project_rows<kGroup>(rows.from(row), wide, columns, sums + row); },
            [&](int64_t row) { project_rows<1>(rows.from(row), wide, columns, sums + row); });
      });
}

template <class T>
void subtract_of(const Basis& basis, float* w, const double* coefficients, int64_t n, int64_t owned,
                 double* out, int threads) {
  reduce_tiles(
      n, owned, kColumns, 1, threads, out, [&](int64_t begin, int64_t end, lanes::Sum* sums) {
        alignas(64) double wide[kColumns];
        const int64_t columns = end - begin;
        const T* tile = row_of<T>(basis, 0) + begin;
        const Rows<T> rows = {tile, basis.stride, tile + kGroup * basis.stride, basis.stride};
        T* none = nullptr;
        widen_tile(w + begin, columns, wide);
        grouped(
            basis.rows,
            [&](int64_t r) {
              subtract_rows<kGroup, false>(rows.from(r), coefficients + r, wide, columns, none, 0);
            },
            [&](int64_t r) {
              subtract_rows<1, false>(rows.from(r), coefficients + r, wide, columns, none, 0);
            });
        narrow_tile(wide, columns, w + begin);
        widen_tile(w + begin, columns, wide);
        add_square(wide, columns, sums);
      });
}

// One thread's work in subtract_project. The rows of a tile stay in cache from their update until
// their products, which are formed group by group between the updates of the next tile: the
// processor computes with one tile while it waits for the other. kCopy: they stay there as a copy.
template <class T, bool kCopy>
class Fused {
 public:
  Fused(const Basis& basis, const double* coefficients, int64_t width)
      : basis_(basis),
        coefficients_(coefficients),
        stride_(kCopy ? width + 64 / int64_t{sizeof(T)} : basis.stride),
        copies_(kCopy ? static_cast<size_t>(basis.rows * stride_) : 0) {}

  // Updates tile [begin, end) of w and finishes the tile before it.
  void advance(float* w, int64_t begin, int64_t end, lanes::Sum* sums) {
    double* next = wide_[turn_];
    const int64_t columns = end - begin;
    const T* tile = row_of<T>(basis_, 0) + begin;
    widen_tile(w + begin, columns, next);
    grouped(
        basis_.rows, [&](int64_t row) { step<kGroup>(tile, row, next, columns); },
        [&](int64_t row) { step<1>(tile, row, next, columns); });
    narrow_tile(next, columns, w + begin);
    widen_tile(w + begin, columns, next);
    kept_ = kCopy ? copies_.data() : tile;
    columns_ = columns;
    sums_ = sums;
    turn_ = 1 - turn_;
  }

  // The products of the last tile.
  void finish() {
    grouped(
        basis_.rows, [&](int64_t row) { products<kGroup, 0>(row, nullptr, 0); },
        [&](int64_t row) { products<1, 0>(row, nullptr, 0); });
  }

 private:
  // The products of a group of rows in the tile before, then the group's update of this tile. Each
  // half of the work asks for half of the group after it, so that memory is never idle.
  template <int kRows>
  void step(const T* tile, int64_t row, double* next, int64_t columns) {
    constexpr int kHalf = (kRows + 1) / 2;
    const bool last = row + kRows >= basis_.rows;
    const T* ahead = last ? tile + columns : tile + (row + kRows) * basis_.stride;
    if (sums_) products<kRows, kHalf>(row, ahead, basis_.stride);
    const Rows<T> rows = {tile + row * basis_.stride, basis_.stride, ahead + kHalf * basis_.stride,
                          basis_.stride};
    T* copy = kCopy ? copies_.data() + row * stride_ : nullptr;
    subtract_rows<kRows, kCopy, kRows - kHalf>(rows, coefficients_ + row, next, columns, copy,
                                               stride_);
  }

  template <int kRows, int kAhead>
  void products(int64_t row, const T* ahead, int64_t ahead_stride) {
    const Rows<T> rows = {kept_ + row * stride_, stride_, ahead, ahead_stride};
    project_rows<kRows, kAhead>(rows, wide_[1 - turn_], columns_, sums_ + row);
  }

  const Basis& basis_;
  const double* coefficients_;
  const int64_t stride_;  // of the kept rows
  std::vector<T> copies_;
  const T* kept_ = nullptr;
  alignas(64) double wide_[2][kFusedColumns];
  int turn_ = 0;
  int64_t columns_ = 0;
  lanes::Sum* sums_ = nullptr;  // of the tile whose products are due
};

// Columns whose rows take half of a 512 KB second-level cache.
template <class T>
int64_t fused_columns(int64_t rows) {
  const int64_t fit = (int64_t{256} << 10) / int64_t{sizeof(T)} / std::max<int64_t>(rows, 1);
  return std::min(kFusedColumns, std::max<int64_t>(fit / 64 * 64, 64));
}

// Whether rows this far apart would evict each other from a second-level cache of 8 ways of 64 KB
// (the least that current processors have), as rows apart by a power of two do.
template <class T>
bool rows_collide(const Basis& basis, int64_t width) {
  constexpr int64_t kSets = 1024, kLine = 64, kWays = 6;  // two ways for everything else
  std::vector<int> lines(kSets);
  const int64_t bytes = basis.stride * static_cast<int64_t>(sizeof(T));
  for (int64_t row = 0; row < basis.rows; ++row)
    for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(T)); at += kLine)
      if (++lines[static_cast<size_t>((row * bytes + at) / kLine % kSets)] > kWays) return true;
  return false;
}

template <bool kCopy, class T>
void subtract_project_with(const Basis& basis, float* w, const double* coefficients, int64_t n,
                           int64_t owned, int64_t width, double* out, int threads) {
  const int64_t count = basis.rows;
  std::vector<double> partials(static_cast<size_t>(parallel::block_count(n) * count));
  parallel::blocks(n, threads, [&](int64_t block, int64_t begin, int64_t end) {
    std::vector<lanes::Sum> sums(static_cast<size_t>(count)), unused(static_cast<size_t>(count));
    Fused<T, kCopy> fused(basis, coefficients, width);
    for (int64_t i = begin, stop; i < end; i = stop) {
      stop = std::min(i + width, end);
      if (i < owned && owned < stop) stop = owned;
      fused.advance(w, i, stop, i < owned ? sums.data() : unused.data());
    }
    fused.finish();
    for (int64_t s = 0; s < count; ++s)
      partials[static_cast<size_t>(block * count + s)] = sums[static_cast<size_t>(s)].value();
  });
  parallel::collect(partials, count, out);
}

template <class T>
void subtract_project_of(const Basis& basis, float* w, const double* coefficients, int64_t n,
                         int64_t owned, double* out, int threads) {
  const int64_t width = fused_columns<T>(basis.rows);
  const auto run = rows_collide<T>(basis, width) ? subtract_project_with<true, T>
                                                 : subtract_project_with<false, T>;
  run(basis, w, coefficients, n, owned, width, out, threads);
}

// Row j of `sums` += the rows times row j of `coefficients`, for kOut rows j.
template <int kRows, int kOut, int kAhead, class T>
void combine_rows(const Rows<T>& rows, const double* coefficients, int64_t coefficient_stride,
                  double* sums, int64_t columns) {
  D8 factors[kOut][kRows];
  for (int j = 0; j < kOut; ++j)
    for (int r = 0; r < kRows; ++r)
      factors[j][r] = lanes::broadcast(coefficients[j * coefficient_stride + r]);
  lanes::each_ahead(
      columns, [&](int64_t i) DS_HESSIAN_INLINED { rows.template prefetch<kAhead>(i); },
      [&](int64_t i, auto io) {
        D8 sum[kOut];
        for (int j = 0; j < kOut; ++j) sum[j] = load_wide(sums + j * kColumns + i);
        for (int r = 0; r < kRows; ++r) {
          const D8 x = io.wide(rows.data + r * rows.stride + i);
          for (int j = 0; j < kOut; ++j) sum[j] = lanes::add_product(sum[j], x, factors[j][r]);
        }
        for (int j = 0; j < kOut; ++j) store_wide(sums + j * kColumns + i, sum[j]);
      });
}

// Two of the k outputs at a time: their factors stay in registers. The rows come from memory for
// the first two, and from the cache for the others.
template <int kRows, class T>
void combine_all(const Rows<T>& rows, const double* coefficients, int64_t coefficient_stride,
                 int64_t k, double* sums, int64_t columns) {
  for (int64_t j = 0; j < k; j += 2) {
    const auto two = j == 0 ? combine_rows<kRows, 2, kRows, T> : combine_rows<kRows, 2, 0, T>;
    const auto one = j == 0 ? combine_rows<kRows, 1, kRows, T> : combine_rows<kRows, 1, 0, T>;
    (j + 2 <= k ? two : one)(rows, coefficients + j * coefficient_stride, coefficient_stride,
                             sums + j * kColumns, columns);
  }
}

template <class T>
void combine_of(const Basis& basis, const double* coefficients, int64_t k, float* out,
                int64_t out_stride, int64_t n, int threads) {
  parallel::blocks(n, threads, [&](int64_t, int64_t first, int64_t last) {
    std::vector<double> sums(static_cast<size_t>(k * kColumns));
    // 256 KB of sums at most stay in the second-level cache while the rows pass by.
    const int64_t fit = (int64_t{32} << 10) / std::max<int64_t>(k, 1) / 64 * 64;
    const int64_t width = std::min(kFusedColumns, std::max<int64_t>(fit, 64));
    for (int64_t begin = first; begin < last; begin += width) {
      const int64_t columns = std::min(width, last - begin);
      const T* tile = row_of<T>(basis, 0) + begin;
      const Rows<T> rows = {tile, basis.stride, tile + kGroup * basis.stride, basis.stride};
      std::fill(sums.begin(), sums.end(), 0.0);
      grouped(
          basis.rows,
          [&](int64_t row) {
            combine_all<kGroup>(rows.from(row), coefficients + row, basis.rows, k, sums.data(),
                                columns);
          },
          [&](int64_t row) {
            combine_all<1>(rows.from(row), coefficients + row, basis.rows, k, sums.data(), columns);
          });
      for (int64_t j = 0; j < k; ++j)
        narrow_tile(sums.data() + j * kColumns, columns, out + j * out_stride + begin);
    }
  });
}

}  // namespace

void project(const Basis& basis, const float* w, int64_t owned, double* out, const Launch& launch) {
  const auto run = basis.dtype == Dtype::kBFloat16 ? project_of<bf16> : project_of<float>;
  run(basis, w, owned, out, launch.threads);
}

void subtract(const Basis& basis, float* w, const double* coefficients, int64_t n, int64_t owned,
              double* out, const Launch& launch) {
  const auto run = basis.dtype == Dtype::kBFloat16 ? subtract_of<bf16> : subtract_of<float>;
  run(basis, w, coefficients, n, owned, out, launch.threads);
}

void subtract_project(const Basis& basis, float* w, const double* coefficients, int64_t n,
                      int64_t owned, double* out, const Launch& launch) {
  const auto run =
      basis.dtype == Dtype::kBFloat16 ? subtract_project_of<bf16> : subtract_project_of<float>;
  run(basis, w, coefficients, n, owned, out, launch.threads);
}

void combine(const Basis& basis, const double* coefficients, int64_t k, float* out,
             int64_t out_stride, int64_t n, const Launch& launch) {
  const auto run = basis.dtype == Dtype::kBFloat16 ? combine_of<bf16> : combine_of<float>;
  run(basis, coefficients, k, out, out_stride, n, launch.threads);
}

}  // namespace cpu
}  // namespace ds_hessian
