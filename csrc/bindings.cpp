// Python's view of the kernels of one backend (DS_HESSIAN_BACKEND: cpu or cuda), named
// DS_HESSIAN_MODULE. Addresses are integers; nothing here knows torch. The GIL is released for the
// length of every call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "contracts.h"

namespace py = pybind11;
namespace backend = ds_hessian::DS_HESSIAN_BACKEND;
using namespace ds_hessian;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (threads, device, stream, workspace)
struct Where : Launch {
  explicit Where(const std::array<uintptr_t, 4>& w)
      : Launch{static_cast<int>(w[0]), static_cast<int>(w[1]), at<void>(w[2]), at<double>(w[3])} {}
};

using Address = uintptr_t;
using Place = std::array<uintptr_t, 4>;

// (address, stride, rows, dtype)
Basis basis_of(const std::array<int64_t, 4>& b) {
  return {at<const void>(static_cast<Address>(b[0])), b[1], b[2], static_cast<Dtype>(b[3])};
}
using BasisTuple = std::array<int64_t, 4>;

void displace(const std::vector<std::array<int64_t, 5>>& table, Address v, float h, int64_t owned,
              Address out, const Place& place) {
  std::vector<Shard> shards;
  shards.reserve(table.size());
  for (const auto& s : table)  // (weight, master, length, weight dtype, master dtype)
    shards.push_back({at<void>(static_cast<Address>(s[0])),
                      at<const void>(static_cast<Address>(s[1])), s[2], static_cast<Dtype>(s[3]),
                      static_cast<Dtype>(s[4])});
  backend::displace(shards, at<const float>(v), h, owned, at<double>(out), Where(place));
}

void dots(const std::vector<std::array<uintptr_t, 2>>& table, int64_t owned, Address out,
          const Place& place) {
  std::vector<Pair> pairs;
  pairs.reserve(table.size());
  for (const auto& p : table) pairs.push_back({at<const float>(p[0]), at<const float>(p[1])});
  backend::dots(pairs, owned, at<double>(out), Where(place));
}

void difference(Address plus, Address minus, float scale, Address zero, int64_t n, int64_t owned,
                Address out, const Place& place) {
  backend::difference(at<float>(plus), at<const float>(minus), scale, at<const float>(zero), n,
                      owned, at<double>(out), Where(place));
}

void curvature_ratio(Address plus, Address minus, Address zero, int64_t owned, Address out,
                     const Place& place) {
  backend::curvature_ratio(at<const float>(plus), at<const float>(minus), at<const float>(zero),
                           owned, at<double>(out), Where(place));
}

void normalize_store(Address w, float scale, Address v, Address row, int row_dtype, int64_t n,
                     int64_t owned, Address out, const Place& place) {
  backend::normalize_store(at<const float>(w), scale, at<float>(v), at<void>(row),
                           static_cast<Dtype>(row_dtype), n, owned, at<double>(out), Where(place));
}

void project(const BasisTuple& basis, Address w, int64_t owned, Address out, const Place& place) {
  backend::project(basis_of(basis), at<const float>(w), owned, at<double>(out), Where(place));
}

void subtract(const BasisTuple& basis, Address w, Address coefficients, int64_t n, int64_t owned,
              Address out, const Place& place) {
  backend::subtract(basis_of(basis), at<float>(w), at<const double>(coefficients), n, owned,
                    at<double>(out), Where(place));
}

void subtract_project(const BasisTuple& basis, Address w, Address coefficients, int64_t n,
                      int64_t owned, Address out, const Place& place) {
  backend::subtract_project(basis_of(basis), at<float>(w), at<const double>(coefficients), n, owned,
                            at<double>(out), Where(place));
}

void combine(const BasisTuple& basis, Address coefficients, int64_t k, Address out,
             int64_t out_stride, int64_t n, const Place& place) {
  backend::combine(basis_of(basis), at<const double>(coefficients), k, at<float>(out), out_stride,
                   n, Where(place));
}

#ifdef DS_HESSIAN_CPU
// x: (address, rows, columns, stride of rows, stride of columns)
void add_square(Address pieces, int64_t piece, const std::array<int64_t, 5>& x, float alpha,
                const Place& place) {
  const Matrix matrix{at<const float>(static_cast<Address>(x[0])), x[1], x[2], x[3], x[4]};
  backend::add_square(at<float>(pieces), piece, matrix, alpha, Where(place));
}
#endif

void gaussian(Address out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
              const Place& place) {
  backend::gaussian(at<float>(out), n, key, stream, start, Where(place));
}

void rademacher(Address out, int64_t n, uint64_t key, uint64_t stream, int64_t start,
                const Place& place) {
  backend::rademacher(at<float>(out), n, key, stream, start, Where(place));
}

void copy(Address to, Address from, int64_t bytes, const Place& place) {
  backend::copy(at<void>(to), at<const void>(from), bytes, Where(place));
}

// The first instruction set that the kernels use and this processor lacks; empty if none.
std::string missing_feature() {
#if defined(__x86_64__)
  const uint32_t needed = backend::required_features();
  __builtin_cpu_init();
  if ((needed & 1) && !__builtin_cpu_supports("avx")) return "avx";
  if ((needed & 2) && !__builtin_cpu_supports("avx2")) return "avx2";
  if ((needed & 4) && !__builtin_cpu_supports("fma")) return "fma";
  if ((needed & 8) && !__builtin_cpu_supports("avx512f")) return "avx512f";
  if ((needed & 16) && !(__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                         __builtin_cpu_supports("avx512vl")))
    return "avx512bw/dq/vl";
#endif
  return "";
}

}  // namespace

PYBIND11_MODULE(DS_HESSIAN_MODULE, m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.doc() = "Fused kernels over addresses; ds_hessian.ops checks the arguments.";
  m.def("workspace_size", &backend::workspace_size);
  m.def("missing_feature", &missing_feature);
  m.def("displace", &displace, Release());
  m.def("dots", &dots, Release());
  m.def("difference", &difference, Release());
  m.def("curvature_ratio", &curvature_ratio, Release());
  m.def("normalize_store", &normalize_store, Release());
  m.def("project", &project, Release());
  m.def("subtract", &subtract, Release());
  m.def("subtract_project", &subtract_project, Release());
  m.def("combine", &combine, Release());
#ifdef DS_HESSIAN_CPU
  m.def("add_square", &add_square, Release());
#endif
  m.def("gaussian", &gaussian, Release());
  m.def("rademacher", &rademacher, Release());
  m.def("copy", &copy, Release());
}
