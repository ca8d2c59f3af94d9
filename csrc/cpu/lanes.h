// Eight lanes at a time: loads, stores and conversions of fp32, bf16 and fp16, and fp64 sums.
//
// The lane count is fixed and every operation is lane-wise, so the bits do not depend on the
// instruction set that the compiler maps it to.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../contracts.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds_hessian {
namespace lanes {

#define DS_HESSIAN_LANE inline __attribute__((always_inline))

constexpr int64_t kLanes = 8;

typedef float F4 __attribute__((vector_size(16)));
typedef float F8 __attribute__((vector_size(32)));
typedef double D4 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

struct D8 {
  D4 low, high;

  // In a fixed order of its own, so that a total is a function of the eight values alone.
  DS_HESSIAN_LANE double total() const {
    const D4 sum = low + high;
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
  }
};

DS_HESSIAN_LANE D8 zeros() { return {D4{0, 0, 0, 0}, D4{0, 0, 0, 0}}; }

DS_HESSIAN_LANE D8 operator+(const D8& a, const D8& b) { return {a.low + b.low, a.high + b.high}; }
DS_HESSIAN_LANE D8 operator-(const D8& a, const D8& b) { return {a.low - b.low, a.high - b.high}; }
DS_HESSIAN_LANE D8 operator*(const D8& a, const D8& b) { return {a.low * b.low, a.high * b.high}; }
DS_HESSIAN_LANE D8 operator*(const D8& a, double b) { return {a.low * b, a.high * b}; }

// sum + a b. Of two widened fp32 values the product is exact, so that contracting it changes
// nothing; with an fp64 factor the last bit may depend on whether the processor has FMA.
DS_HESSIAN_LANE D8 add_product(const D8& sum, const D8& a, const D8& b) {
#if defined(__FMA__)
  return {(D4)_mm256_fmadd_pd((__m256d)a.low, (__m256d)b.low, (__m256d)sum.low),
          (D4)_mm256_fmadd_pd((__m256d)a.high, (__m256d)b.high, (__m256d)sum.high)};
#else
  return sum + a * b;
#endif
}

// The same of fp32 numbers, where the product is rounded with the sum or, without FMA, by itself.
DS_HESSIAN_LANE F8 add_product(F8 sum, F8 a, F8 b) {
#if defined(__FMA__)
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

DS_HESSIAN_LANE D8 broadcast(double x) { return {D4{x, x, x, x}, D4{x, x, x, x}}; }

// Keeps x in registers where the compiler would rather read memory at each use.
DS_HESSIAN_LANE void keep(D8* x) {
#if defined(__AVX__)
  asm("" : "+x"(x->low), "+x"(x->high));
#else
  (void)x;
#endif
}
DS_HESSIAN_LANE void keep(F8* x) {
#if defined(__AVX__)
  asm("" : "+x"(*x));
#else
  (void)x;
#endif
}

DS_HESSIAN_LANE D8 widen(F8 x) {
#if defined(__AVX__)
  return {(D4)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)),
          (D4)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1))};
#else
  D8 wide;
  for (int i = 0; i < 4; ++i) {
    wide.low[i] = x[i];
    wide.high[i] = x[i + 4];
  }
  return wide;
#endif
}

DS_HESSIAN_LANE F8 narrow(const D8& x) {
#if defined(__AVX__)
  return (F8)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps((__m256d)x.low)),
                                  _mm256_cvtpd_ps((__m256d)x.high), 1);
#else
  F8 out;
  for (int i = 0; i < 4; ++i) {
    out[i] = static_cast<float>(x.low[i]);
    out[i + 4] = static_cast<float>(x.high[i]);
  }
  return out;
#endif
}

DS_HESSIAN_LANE U8 bits_of(F8 x) {
  U8 bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

DS_HESSIAN_LANE F8 from_bits(U8 bits) {
  F8 x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

DS_HESSIAN_LANE F8 decode(F8 stored, const float*) { return stored; }

DS_HESSIAN_LANE U8 widen(H8 x) {
#if defined(__AVX2__)
  return (U8)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, U8);
#endif
}

DS_HESSIAN_LANE F8 decode(H8 stored, const bf16*) { return from_bits(widen(stored) << 16); }

inline float decode_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  uint32_t bits;
  if (magnitude >= 0x7C00u) {
    bits = 0x7F800000u | (magnitude & 0x3FFu) << 13;
  } else if (magnitude >= 0x0400u) {
    bits = (magnitude << 13) + 0x38000000u;
  } else {  // subnormal: an exact product
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    memcpy(&bits, &value, sizeof bits);
  }
  bits |= sign;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t encode_fp16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and above round to Inf
  if (magnitude < 0x38800000u) {  // subnormal result: adding 0.5 rounds at bit 2^-24
    float positive;
    memcpy(&positive, &magnitude, sizeof positive);
    positive += 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &positive, sizeof rounded);
    return sign | static_cast<uint16_t>(rounded - 0x3F000000u);
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

DS_HESSIAN_LANE F8 decode(H8 stored, const fp16*) {
#if defined(__F16C__)
  return (F8)_mm256_cvtph_ps((__m128i)stored);
#else
  F8 out;
  for (int i = 0; i < 8; ++i) out[i] = decode_fp16(stored[i]);
  return out;
#endif
}

// The upper halves of eight fp32 numbers with these bits.
DS_HESSIAN_LANE H8 upper_halves(U8 bits) {
  const U8 upper = bits >> 16;
#if defined(__AVX2__)
  const __m256i words = (__m256i)upper;
  return (H8)_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
  return __builtin_convertvector(upper, H8);
#endif
}

// `then` in the lanes where x is NaN.
DS_HESSIAN_LANE U8 where_nan(F8 x, U8 then, U8 otherwise) { return x != x ? then : otherwise; }

DS_HESSIAN_LANE H8 encode(F8 x, const bf16*) {
  const U8 bits = bits_of(x), nearest = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return upper_halves(where_nan(x, U8{} + 0x7FC00000u, nearest));
}

DS_HESSIAN_LANE H8 encode(F8 x, const fp16*) {
#if defined(__F16C__)
  return (H8)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  H8 out;
  for (int i = 0; i < 8; ++i) out[i] = encode_fp16(x[i]);
  return out;
#endif
}

DS_HESSIAN_LANE F8 encode(F8 x, const float*) { return x; }

// Eight stored elements as fp64, without a detour over a whole register of fp32 where that shows.
DS_HESSIAN_LANE D8 decode_wide(F8 stored, const float*) { return widen(stored); }

DS_HESSIAN_LANE D8 decode_wide(H8 stored, const fp16* type) { return widen(decode(stored, type)); }

DS_HESSIAN_LANE D8 decode_wide(H8 stored, const bf16* type) {
#if defined(__AVX__)
  (void)type;
  const __m128i none = _mm_setzero_si128(), bits = (__m128i)stored;  // interleaved: bits << 16
  return {(D4)_mm256_cvtps_pd(_mm_castsi128_ps(_mm_unpacklo_epi16(none, bits))),
          (D4)_mm256_cvtps_pd(_mm_castsi128_ps(_mm_unpackhi_epi16(none, bits)))};
#else
  return widen(decode(stored, type));
#endif
}

template <class T>
struct Stored {
  typedef H8 type;
};
template <>
struct Stored<float> {
  typedef F8 type;
};

template <bool kStreaming, class V>
DS_HESSIAN_LANE void put(void* to, V x) {
#if defined(__AVX__)
  if (kStreaming && sizeof(V) == 32) {
    __m256i bits;
    memcpy(&bits, &x, sizeof(V));
    _mm256_stream_si256(static_cast<__m256i*>(to), bits);
    return;
  }
  if (kStreaming && sizeof(V) == 16) {
    __m128i bits;
    memcpy(&bits, &x, sizeof(V));
    _mm_stream_si128(static_cast<__m128i*>(to), bits);
    return;
  }
#endif
  memcpy(to, &x, sizeof(V));
}

// Eight whole elements. A store returns what was stored, as fp32.
struct Full {
  template <class T>
  DS_HESSIAN_LANE D8 wide(const T* from) const {
    typename Stored<T>::type stored;
    memcpy(&stored, from, sizeof stored);
    return decode_wide(stored, from);
  }
  DS_HESSIAN_LANE D8 wide(const float* from) const {
#if defined(__AVX__)
    return {(D4)_mm256_cvtps_pd(_mm_loadu_ps(from)), (D4)_mm256_cvtps_pd(_mm_loadu_ps(from + 4))};
#else
    return widen(load(from));
#endif
  }
  template <class T>
  DS_HESSIAN_LANE D8 store_wide(T* to, F8 x) const {
    const typename Stored<T>::type stored = encode(x, static_cast<const T*>(to));
    memcpy(to, &stored, sizeof stored);
    return decode_wide(stored, static_cast<const T*>(to));
  }
  template <class T>
  DS_HESSIAN_LANE F8 load(const T* from) const {
    typename Stored<T>::type stored;
    memcpy(&stored, from, sizeof stored);
    return decode(stored, from);
  }
  template <class T>
  DS_HESSIAN_LANE F8 store(T* to, F8 x) const {
    const typename Stored<T>::type stored = encode(x, static_cast<const T*>(to));
    memcpy(to, &stored, sizeof stored);
    return decode(stored, static_cast<const T*>(to));
  }
  template <class T>
  DS_HESSIAN_LANE void put(T* to, const T* from) const {
    typename Stored<T>::type stored;
    memcpy(&stored, from, sizeof stored);
    memcpy(to, &stored, sizeof stored);
  }
};

// As Full, past the caches: a line that is written whole need not be read first. `to` is aligned
// to the store's size.
struct Streaming : Full {
  template <class T>
  DS_HESSIAN_LANE F8 store(T* to, F8 x) const {
    const typename Stored<T>::type stored = encode(x, static_cast<const T*>(to));
    ds_hessian::lanes::put<true>(to, stored);
    return decode(stored, static_cast<const T*>(to));
  }
};

// The first `count` of eight elements; the other lanes read as 0, also after a store.
struct Partial {
  int64_t count;
  template <class T>
  DS_HESSIAN_LANE D8 wide(const T* from) const {
    return widen(load(from));
  }
  template <class T>
  DS_HESSIAN_LANE D8 store_wide(T* to, F8 x) const {
    return widen(store(to, x));
  }
  template <class T>
  DS_HESSIAN_LANE F8 load(const T* from) const {
    typename Stored<T>::type stored = {};
    memcpy(&stored, from, static_cast<size_t>(count) * sizeof(T));
    return decode(stored, from);
  }
  template <class T>
  DS_HESSIAN_LANE F8 store(T* to, F8 x) const {
    const typename Stored<T>::type stored = encode(x, static_cast<const T*>(to));
    memcpy(to, &stored, static_cast<size_t>(count) * sizeof(T));
    return load(static_cast<const T*>(to));
  }
  template <class T>
  DS_HESSIAN_LANE void put(T* to, const T* from) const {
    memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  }
};

// Calls step(i, io) for i = begin, begin + 8, ...; the last call may be a Partial.
template <class Whole = Full, class Step>
DS_HESSIAN_LANE void each(int64_t begin, int64_t end, const Step& step) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) step(i, Whole{});
  if (i < end) step(i, Partial{end - i});
}

// As each(), with ahead(i) called once for every kSteps steps before them.
template <int kSteps, class Ahead, class Step>
DS_HESSIAN_LANE void each_ahead(int64_t begin, int64_t end, const Ahead& ahead, const Step& step) {
  int64_t i = begin;
  for (; i + kSteps * kLanes <= end; i += kSteps * kLanes) {
    ahead(i);
    for (int k = 0; k < kSteps; ++k) step(i + k * kLanes, Full{});
  }
  each(i, end, step);
}

// Neumaier's sum: the error does not grow with the number of terms.
struct Sum {
  double sum = 0.0, lost = 0.0;

  void add(double x) {
    const double total = sum + x;
    lost += std::fabs(sum) >= std::fabs(x) ? (sum - total) + x : (x - total) + sum;
    sum = total;
  }
  // `lost` is NaN once a term is not finite; the plain sum then says which of Inf and NaN it is.
  double value() const { return std::isfinite(sum) ? sum + lost : sum; }
};

}  // namespace lanes
}  // namespace ds_hessian
