// Contracts shared by the CPU and the CUDA kernels and by their bindings.
//
// Nothing here knows torch: a kernel takes addresses, lengths, dtype codes and where to run. Every
// argument has been checked by the caller (ds_hessian/ops/checks.py); a kernel checks nothing.
//
// * A vector is a contiguous fp32 array of `n` elements. Its first `owned` elements are the
//   coordinates that this rank owns. Updates touch all n, sums run over the owned prefix only.
// * A basis is `rows` rows of n elements, `stride` elements apart, in fp32 or bf16.
// * Products of two fp32 values are formed in fp64, where they are exact, and summed in fp64 in an
//   order that depends on the lengths alone: the same bits on every run, number of threads, and
//   GPU. Products with bf16 rows are formed in fp32 and added up there in chains of eight, which go
//   to fp64 sums in an order that is as fixed.
// * All element indices and offsets are int64_t.
// * NaN and Inf propagate as in IEEE arithmetic. No kernel contracts a product and a sum into one
//   rounding unless the product is exact, so CPU, CUDA and the torch twins round alike.
// * `out` receives the sums as fp64, on the device of the data. `launch.workspace` is room for
//   `workspace_size(sums)` fp64 values on that device.
#pragma once

#include <cstdint>
#include <vector>

#ifndef DS_HESSIAN_BACKEND
#define DS_HESSIAN_BACKEND cpu
#endif

namespace ds_hessian {

// Codes of ds_hessian/ops/checks.py.
enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

// One piece of the weights and the piece of the master that it is written from.
struct Shard {
  void* weight;
  const void* master;
  int64_t length;
  Dtype weight_dtype;
  Dtype master_dtype;
};

struct Basis {
  const void* data;
  int64_t stride;  // elements between rows
  int64_t rows;
  Dtype dtype;
};

struct Matrix {
  const float* data;
  int64_t rows, columns, row_stride, column_stride;
};

struct Pair {
  const float* a;
  const float* b;
};

// Where to run. CPU: `threads`. CUDA: `device`, `stream` (a cudaStream_t) and `workspace`.
struct Launch {
  int threads;
  int device;
  void* stream;
  double* workspace;
};

namespace DS_HESSIAN_BACKEND {

// Number of fp64 values that a kernel with this many sums needs as workspace.
int64_t workspace_size(int64_t sums);

// Instruction sets that the kernels were compiled for; see bindings.cpp.
uint32_t required_features();

// out[i] = <a_i, b_i>.
void dots(const std::vector<Pair>& pairs, int64_t owned, double* out, const Launch& launch);

// w = cast(master + h v), shard after shard; h = 0 writes cast(master) whatever v holds, and v may
// be null. out = <change, v> (0 without v), <change, change>, where change is new weight minus old.
void displace(const std::vector<Shard>& shards, const float* v, float h, int64_t owned, double* out,
              const Launch& launch);

// plus = (plus - minus) * scale. out = <p, p>, <s, s> with p the result and s = plus + minus -
// 2 zero. `zero` may be null: <s, s> is then 0.
void difference(float* plus, const float* minus, float scale, const float* zero, int64_t n,
                int64_t owned, double* out, const Launch& launch);

// out = <d, d>, <s, s> with d = plus - minus and s = plus + minus - 2 zero.
void curvature_ratio(const float* plus, const float* minus, const float* zero, int64_t owned,
                     double* out, const Launch& launch);

// v = scale w, row = cast(v), v = row where row is bf16. out = <v, v>. `row` may be null, v may be
// w.
void normalize_store(const float* w, float scale, float* v, void* row, Dtype row_dtype, int64_t n,
                     int64_t owned, double* out, const Launch& launch);

// out = the `rows` products with w.
void project(const Basis& basis, const float* w, int64_t owned, double* out, const Launch& launch);

// w = w - basis' coefficients, summed in fp64 and rounded once. out = <w, w>.
void subtract(const Basis& basis, float* w, const double* coefficients, int64_t n, int64_t owned,
              double* out, const Launch& launch);

// subtract, then project of the result, with one pass over the basis.
void subtract_project(const Basis& basis, float* w, const double* coefficients, int64_t n,
                      int64_t owned, double* out, const Launch& launch);

// out (k, n), rows out_stride apart = coefficients (k, rows) x basis.
void combine(const Basis& basis, const double* coefficients, int64_t k, float* out,
             int64_t out_stride, int64_t n, const Launch& launch);

// out[i] = variate number start + i of (key, stream).
void gaussian(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
              const Launch& launch);
void rademacher(float* out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
                const Launch& launch);

// to = from, both of `bytes` bytes: the yardstick of the benchmark.
void copy(void* to, const void* from, int64_t bytes, const Launch& launch);

}  // namespace DS_HESSIAN_BACKEND

namespace cpu {

// pieces += alpha x' x on and below the diagonal, in fp32: pieces of `piece` columns (a multiple of
// 48), each contiguous with the rows from its first column on. Of a GPU the libraries' matrix
// products are as fast as there is.
void add_square(float* pieces, int64_t piece, const Matrix& x, float alpha, const Launch& launch);

}  // namespace cpu
}  // namespace ds_hessian
