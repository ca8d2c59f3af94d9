// Products with a basis: all rows of a tile of columns at a time, so that the basis is read once.
#include <cstring>
#include <memory>
#include <type_traits>

#include "reduce.h"

namespace ds_hessian {
namespace cpu {
namespace {

using lanes::D8;
using lanes::F8;
using lanes::Full;
using lanes::widen;

// On a lambda, of prefetches above all: GCC drops a call that returns nothing and writes nothing.
#define DS_HESSIAN_INLINED __attribute__((always_inline))

constexpr int64_t kColumns = 2048;       // of a tile: 16 KB in fp64, half of a first-level cache
constexpr int64_t kFusedColumns = 1024;  // two such tiles and the rows at hand fill that cache
constexpr int kChain = 8;                // products that are added up before they go to a sum

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

// What products with elements of a basis are formed and added up in, kChain at a time: of fp32 rows
// in fp64, where they are exact and a chain simply continues the sum that it goes to; of bf16 rows
// in fp32, so that conversions and additions in fp64 are paid once for each chain. `kRows`: rows at
// a time, whose sums stay in registers. `operand`: w of a tile as these products take it.
template <class T>
struct Chain;

template <>
struct Chain<float> {
  typedef D8 Lanes;
  static constexpr int kRows = 4;

  static const double* operand(const float* w, int64_t columns, double* wide) {
    widen_tile(w, columns, wide);
    return wide;
  }
  template <class Io>
  static DS_HESSIAN_LANE D8 load(const Io& io, const float* from) {
    return io.wide(from);
  }
  template <class Io>
  static DS_HESSIAN_LANE D8 load(const Io&, const double* from) {
    return load_wide(from);
  }
  static DS_HESSIAN_LANE D8 factor(double x) { return lanes::broadcast(x); }
  static DS_HESSIAN_LANE D8 begin(const D8& sum) { return sum; }
  static DS_HESSIAN_LANE D8 end(const D8&, const D8& chain) { return chain; }
};

template <>
struct Chain<bf16> {
  typedef F8 Lanes;
  static constexpr int kRows = kChain;

  static const float* operand(const float* w, int64_t, double*) { return w; }
  template <class Io, class From>
  static DS_HESSIAN_LANE F8 load(const Io& io, const From* from) {
    return io.load(from);
  }
  static DS_HESSIAN_LANE F8 factor(double x) { return F8{} + static_cast<float>(x); }
  static DS_HESSIAN_LANE F8 begin(const D8&) { return F8{}; }
  static DS_HESSIAN_LANE D8 end(const D8& sum, F8 chain) { return sum + widen(chain); }
};

template <class T>
using Operand = decltype(Chain<T>::operand(nullptr, 0, nullptr));

// Steps of eight elements that a line of the cache holds.
template <class T>
constexpr int kSteps = 64 / (lanes::kLanes * sizeof(T));

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

// All rows from column `begin` on; ahead of each group the next one is wanted.
template <class T>
Rows<T> rows_of(const Basis& basis, int64_t begin) {
  const T* data = static_cast<const T*>(basis.data) + begin;
  return {data, basis.stride, data + Chain<T>::kRows * basis.stride, basis.stride};
}

// sums[r] += the product of row r with w.
template <int kRows, int kAhead = kRows, class T>
void project_rows(const Rows<T>& rows, Operand<T> w, int64_t columns, lanes::Sum* sums) {
  using C = Chain<T>;
  D8 partial[kRows];
  for (int r = 0; r < kRows; ++r) partial[r] = lanes::zeros();
  const auto chain = [&](int64_t begin, int64_t end) DS_HESSIAN_INLINED {
    typename C::Lanes products[kRows];
    for (int r = 0; r < kRows; ++r) products[r] = C::begin(partial[r]);
    lanes::each_ahead<kSteps<T>>(
        begin, end, [&](int64_t i) DS_HESSIAN_INLINED { rows.template prefetch<kAhead>(i); },
        [&](int64_t i, auto io) {
          auto x = C::load(io, w + i);
          lanes::keep(&x);  // used kRows times: the loads of the rows are what limits this loop
          for (int r = 0; r < kRows; ++r) {
            const auto y = C::load(io, rows.data + r * rows.stride + i);
            products[r] = lanes::add_product(products[r], y, x);
          }
        });
    for (int r = 0; r < kRows; ++r) partial[r] = C::end(partial[r], products[r]);
  };
  constexpr int64_t kWhole = kChain * lanes::kLanes;
  int64_t i = 0;
  for (; i + kWhole <= columns; i += kWhole) chain(i, i + kWhole);
  if (i < columns) chain(i, columns);
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
  using C = Chain<T>;
  typename C::Lanes factors[kRows];
  for (int r = 0; r < kRows; ++r) factors[r] = C::factor(-coefficients[r]);
  lanes::each_ahead<kSteps<T>>(
      0, columns, [&](int64_t i) DS_HESSIAN_INLINED { rows.template prefetch<kAhead>(i); },
      [&](int64_t i, auto io) {
        const D8 x = load_wide(wide + i);
        auto chain = C::begin(x);
        for (int r = 0; r < kRows; ++r) {
          const T* row = rows.data + r * rows.stride + i;
          chain = lanes::add_product(chain, C::load(io, row), factors[r]);
          if (kCopy) io.put(copy + r * copy_stride + i, row);
        }
        store_wide(wide + i, C::end(x, chain));
      });
}

// Calls call(std::integral_constant<int, count>()) for a count within 1 .. kMost.
template <int kMost, class Call>
DS_HESSIAN_LANE void with_count(int64_t count, const Call& call) {
  if (count == kMost) return call(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) with_count<kMost - 1>(count, call);
}

// Runs some(row, count) for groups of Chain<T>::kRows rows, and once for the rest.
template <class T, class Some>
DS_HESSIAN_LANE void grouped(int64_t rows, const Some& some) {
  constexpr int kRows = Chain<T>::kRows;
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) some(row, std::integral_constant<int, kRows>());
  if (row < rows) with_count<kRows - 1>(rows - row, [&](auto count) { some(row, count); });
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
  reduce_tiles(owned, owned, kColumns, basis.rows, threads, out,
               [&](int64_t begin, int64_t end, lanes::Sum* sums) {
                 alignas(64) double wide[kColumns];
                 const int64_t columns = end - begin;
                 const auto rows = rows_of<T>(basis, begin);
                 const auto x = Chain<T>::operand(w + begin, columns, wide);
                 grouped<T>(basis.rows, [&](int64_t row, auto count) {
                   project_rows<count()>(rows.from(row), x, columns, sums + row);
                 });
               });
}

template <class T>
void subtract_of(const Basis& basis, float* w, const double* coefficients, int64_t n, int64_t owned,
                 double* out, int threads) {
  reduce_tiles(n, owned, kColumns, 1, threads, out,
               [&](int64_t begin, int64_t end, lanes::Sum* sums) {
                 alignas(64) double wide[kColumns];
                 const int64_t columns = end - begin;
                 const auto rows = rows_of<T>(basis, begin);
                 widen_tile(w + begin, columns, wide);
                 grouped<T>(basis.rows, [&](int64_t row, auto count) {
                   subtract_rows<count(), false>(rows.from(row), coefficients + row, wide, columns,
                                                 static_cast<T*>(nullptr), 0);
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
    const T* tile = static_cast<const T*>(basis_.data) + begin;
    widen_tile(w + begin, columns, next);
    grouped<T>(basis_.rows,
               [&](int64_t row, auto count) { step<count()>(tile, row, next, columns); });
    narrow_tile(next, columns, w + begin);
    x_ = Chain<T>::operand(w + begin, columns, next);
    kept_ = kCopy ? copies_.data() : tile;
    columns_ = columns;
    sums_ = sums;
    turn_ = 1 - turn_;
  }

  // The products of the last tile.
  void finish() {
    grouped<T>(basis_.rows,
               [&](int64_t row, auto count) { products<count(), 0>(row, nullptr, 0); });
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
    project_rows<kRows, kAhead>(rows, x_, columns_, sums_ + row);
  }

  const Basis& basis_;
  const double* coefficients_;
  const int64_t stride_;  // of the kept rows
  std::vector<T> copies_;
  const T* kept_ = nullptr;
  Operand<T> x_ = nullptr;  // w of the tile whose products are due
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
  using C = Chain<T>;
  typename C::Lanes factors[kOut][kRows];
  for (int j = 0; j < kOut; ++j)
    for (int r = 0; r < kRows; ++r)
      factors[j][r] = C::factor(coefficients[j * coefficient_stride + r]);
  lanes::each_ahead<kSteps<T>>(
      0, columns, [&](int64_t i) DS_HESSIAN_INLINED { rows.template prefetch<kAhead>(i); },
      [&](int64_t i, auto io) {
        D8 sum[kOut];
        typename C::Lanes chain[kOut];
        for (int j = 0; j < kOut; ++j) {
          sum[j] = load_wide(sums + j * kColumns + i);
          chain[j] = C::begin(sum[j]);
        }
        for (int r = 0; r < kRows; ++r) {
          const auto x = C::load(io, rows.data + r * rows.stride + i);
          for (int j = 0; j < kOut; ++j) chain[j] = lanes::add_product(chain[j], x, factors[j][r]);
        }
        for (int j = 0; j < kOut; ++j)
          store_wide(sums + j * kColumns + i, C::end(sum[j], chain[j]));
      });
}

// Two of the k outputs at a time: their factors stay in registers. The rows come from memory for
// the first two, and from the cache for the others.
template <int kRows, class T>
void combine_all(const Rows<T>& rows, const double* coefficients, int64_t coefficient_stride,
                 int64_t k, double* sums, int64_t columns) {
  typedef void (*CombineRows)(const Rows<T>&, const double*, int64_t, double*, int64_t);
  constexpr CombineRows kRuns[2][2] = {{combine_rows<kRows, 1, 0>, combine_rows<kRows, 1, kRows>},
                                       {combine_rows<kRows, 2, 0>, combine_rows<kRows, 2, kRows>}};
  for (int64_t j = 0; j < k; j += 2)
    kRuns[j + 2 <= k][j == 0](rows, coefficients + j * coefficient_stride, coefficient_stride,
                              sums + j * kColumns, columns);
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
      const auto rows = rows_of<T>(basis, begin);
      std::fill(sums.begin(), sums.end(), 0.0);
      grouped<T>(basis.rows, [&](int64_t row, auto count) {
        combine_all<count()>(rows.from(row), coefficients + row, basis.rows, k, sums.data(),
                             columns);
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
