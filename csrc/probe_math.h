// Philox4x32-10 and the Box-Muller transform, from operations that every compiler rounds alike.
//
// Shared by the CPU and CUDA probes; ds_hessian/ops/random.py is the same in torch. Every fp64
// operation is rounded on its own: no contraction, no library functions but sqrt.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define DS_HESSIAN_INLINE __host__ __device__ __forceinline__
#else
#define DS_HESSIAN_INLINE inline __attribute__((always_inline))
#endif

namespace ds_hessian {
namespace probe {

DS_HESSIAN_INLINE double mul(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

DS_HESSIAN_INLINE double add(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

DS_HESSIAN_INLINE double divide(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

DS_HESSIAN_INLINE double root(double x) {
#ifdef __CUDA_ARCH__
  return __dsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

DS_HESSIAN_INLINE uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

DS_HESSIAN_INLINE double from_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Exact. By way of int32, which SSE2 and AVX2 can convert and uint32 they cannot.
DS_HESSIAN_INLINE double to_double(uint32_t word) {
  return static_cast<double>(static_cast<int32_t>(word ^ 0x80000000u)) + 2147483648.0;
}

struct Words {
  uint32_t x0, x1, x2, x3;
};

// The four words of block `block` of `stream` under `key`.
DS_HESSIAN_INLINE Words philox(uint64_t key, uint64_t stream, uint64_t block) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t second = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// ln(x) for normal x in (0, 1): e ln2 + 2 artanh((m-1)/(m+1)), m in [sqrt(1/2), sqrt(2)).
DS_HESSIAN_INLINE double log_of(double x) {
  const uint64_t bits = bits_of(x);
  const int32_t biased = static_cast<int32_t>(bits >> 52);
  double mantissa = from_bits((bits & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull);  // [0.5, 1)
  const bool small = mantissa < 0.70710678118654757;  // sqrt(0.5) in fp64
  mantissa = small ? mantissa * 2.0 : mantissa;
  const double exponent = static_cast<double>(biased - 1022) - (small ? 1.0 : 0.0);
  const double z = divide(mantissa - 1.0, mantissa + 1.0);
  const double z2 = mul(z, z);
  double series = 1.0 / 21.0;
  series = add(mul(series, z2), 1.0 / 19.0);
  series = add(mul(series, z2), 1.0 / 17.0);
  series = add(mul(series, z2), 1.0 / 15.0);
  series = add(mul(series, z2), 1.0 / 13.0);
  series = add(mul(series, z2), 1.0 / 11.0);
  series = add(mul(series, z2), 1.0 / 9.0);
  series = add(mul(series, z2), 1.0 / 7.0);
  series = add(mul(series, z2), 1.0 / 5.0);
  series = add(mul(series, z2), 1.0 / 3.0);
  series = add(mul(series, z2), 1.0);
  return add(mul(exponent, 0.69314718055994529), mul(2.0, mul(z, series)));
}

DS_HESSIAN_INLINE double sine_series(double x2) {
  double total = 1.0 / 355687428096000.0;
  total = add(mul(total, x2), -1.0 / 1307674368000.0);
  total = add(mul(total, x2), 1.0 / 6227020800.0);
  total = add(mul(total, x2), -1.0 / 39916800.0);
  total = add(mul(total, x2), 1.0 / 362880.0);
  total = add(mul(total, x2), -1.0 / 5040.0);
  total = add(mul(total, x2), 1.0 / 120.0);
  total = add(mul(total, x2), -1.0 / 6.0);
  return add(mul(total, x2), 1.0);
}

DS_HESSIAN_INLINE double cosine_series(double x2) {
  double total = -1.0 / 6402373705728000.0;
  total = add(mul(total, x2), 1.0 / 20922789888000.0);
  total = add(mul(total, x2), -1.0 / 87178291200.0);
  total = add(mul(total, x2), 1.0 / 479001600.0);
  total = add(mul(total, x2), -1.0 / 3628800.0);
  total = add(mul(total, x2), 1.0 / 40320.0);
  total = add(mul(total, x2), -1.0 / 720.0);
  total = add(mul(total, x2), 1.0 / 24.0);
  total = add(mul(total, x2), -1.0 / 2.0);
  return add(mul(total, x2), 1.0);
}

// Two standard normal variates from two words: radius times cosine and sine of a random angle.
DS_HESSIAN_INLINE void gaussian_pair(uint32_t radius_word, uint32_t angle_word, float* cosine,
                                     float* sine) {
  const double half_pi = 1.5707963267948966;
  const double u = mul(add(to_double(radius_word), 0.5), 0x1p-32);
  const double radius = root(mul(-2.0, log_of(u)));
  const uint32_t quarter = angle_word >> 30;
  const double offset = static_cast<double>(static_cast<int32_t>(angle_word & 0x3FFFFFFFu)) + 0.5;
  const bool upper = offset > 536870912.0;  // the upper octant of the quarter turn
  double t = mul(offset, half_pi * 0x1p-30);
  t = upper ? add(half_pi, -t) : t;
  const double t2 = mul(t, t);
  const double s = mul(t, sine_series(t2)), c = cosine_series(t2);
  const double sin_t = upper ? c : s, cos_t = upper ? s : c;
  const bool odd = (quarter & 1u) != 0;
  const double x = odd ? sin_t : cos_t, y = odd ? cos_t : sin_t;
  // cosine is negative in quarters 1 and 2, sine in quarters 2 and 3
  const uint64_t x_sign = static_cast<uint64_t>((quarter ^ (quarter >> 1)) & 1u) << 63;
  const uint64_t y_sign = static_cast<uint64_t>(quarter >> 1) << 63;
  *cosine = static_cast<float>(mul(radius, from_bits(bits_of(x) ^ x_sign)));
  *sine = static_cast<float>(mul(radius, from_bits(bits_of(y) ^ y_sign)));
}

}  // namespace probe
}  // namespace ds_hessian
