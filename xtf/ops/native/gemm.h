// Matrix products from blocks that fit the registers, after Goto and van de Geijn (2008), "Anatomy of high-performance matrix
// multiplication", and BLIS (Van Zee and van de Geijn 2015): the right factor is packed into panels of NR columns, a block of up to
// MR x NR results is kept in registers while the inner dimension passes. The left factor is read where it is, one number at a time.
//
// Written with the vector types of GCC and Clang, so that one text serves every set of instructions.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace xtf {

#if defined(__AVX512F__)
constexpr int W = 16, MR = 14;  // 28 of 32 registers hold results
#elif defined(__AVX__)
constexpr int W = 8, MR = 6;  // 12 of 16
#else
constexpr int W = 4, MR = 6;
#endif
constexpr int NV = 2, NR = NV * W;  // columns of a panel

typedef float Vector __attribute__((vector_size(W * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(W * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(W * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Unaligned*>(p) = v; }
constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// How results are written: over what is there, added to it, or over it and past the caches, for what is not read soon.
enum class Write { over, add, past };

template <Write how>
inline void put(float* p, Vector v) {
  if constexpr (how == Write::add) v += load(p);
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (how == Write::past) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(Vector) == 0) {
      __builtin_ia32_movntps512(p, v);
      return;
    }
  }
#endif
  store(p, v);
}

// c[0:M, 0:n] of a panel: a(i, p) at a[i * ai + p * ap], panel [k][NR].
template <int M, Write how>
void micro(int64_t k, const float* a, int64_t ai, int64_t ap, const float* panel, float* c, int64_t ldc, int n) {
  if constexpr (how != Write::past)  // what the results go over is fetched meanwhile
    for (int i = 0; i < M; i++)
      for (int j = 0; j < NV; j++) __builtin_prefetch(c + i * ldc + j * W, 1);
  Vector sums[M][NV] = {};
  for (int64_t p = 0; p < k; p++) {
    Vector row[NV];
#pragma GCC unroll 2
    for (int j = 0; j < NV; j++) row[j] = load(panel + p * NR + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      const float factor = a[i * ai + p * ap];
#pragma GCC unroll 2
      for (int j = 0; j < NV; j++) sums[i][j] += factor * row[j];
    }
  }
  if (n == NR) {
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 2
      for (int j = 0; j < NV; j++) put<how>(c + i * ldc + j * W, sums[i][j]);
    return;
  }
  for (int i = 0; i < M; i++) {
    float* to = c + i * ldc;
    float row[NR];
    for (int j = 0; j < NV; j++) store(row + j * W, sums[i][j]);
    for (int j = 0; j < n; j++) to[j] = how == Write::add ? to[j] + row[j] : row[j];
  }
}

using Micro = void (*)(int64_t, const float*, int64_t, int64_t, const float*, float*, int64_t, int);
template <Write how, size_t... I>
Micro pick(int m, std::index_sequence<I...>) {
  static constexpr Micro all[] = {micro<I + 1, how>...};
  return all[m - 1];
}

// A block of rows: m of them in `count` blocks of nearly the same size. The first row of block t.
inline int64_t blocks_of(int64_t m) { return (m + MR - 1) / MR; }
inline int64_t begin_of(int64_t m, int64_t count, int64_t t) { return m * t / count; }

// c (m x n) from rows and packed panels, which lie `next` apart.
template <Write how>
void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t ai, int64_t ap, const float* panels, int64_t next, float* c, int64_t ldc) {
  const int64_t count = blocks_of(m);
  for (int64_t j = 0; j < n; j += NR, panels += next)
    for (int64_t t = 0; t < count; t++) {
      const int64_t i = begin_of(m, count, t), rows = begin_of(m, count, t + 1) - i;
      pick<how>(static_cast<int>(rows), std::make_index_sequence<MR>{})(
          k, a + i * ai, ai, ap, panels, c + i * ldc + j, ldc, static_cast<int>(std::min<int64_t>(NR, n - j)));
    }
}

// The transpose of W x W numbers, in log2(W) rounds of interleaving the rows of both halves.
template <size_t... I>
inline void interleave(Vector a, Vector b, Vector& low, Vector& high, std::index_sequence<I...>) {
  low = __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...);
  high = __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...);
}

inline void transpose(const float* from, int64_t ld, float* to) {
  Vector rows[W], next[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) rows[i] = load(from + i * ld);
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; i++) interleave(rows[i], rows[i + W / 2], next[2 * i], next[2 * i + 1], std::make_index_sequence<W>{});
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) store(to + i * NR, rows[i]);
}

// Panels [ceil(n / NR)][k + pad][NR] of a matrix with b(p, j) at b[p * bp + j * bj]; columns and rows past the end are zeros.
inline void pack(const float* b, int64_t bp, int64_t bj, int64_t k, int64_t n, float* to, int64_t pad = 0) {
  for (int64_t j = 0; j < n; j += NR) {
    const int64_t width = std::min<int64_t>(NR, n - j);
    const float* from = b + j * bj;
    int64_t p = 0;
    if (width == NR && bj == 1) {
      for (; p < k; p++, to += NR)
        for (int v = 0; v < NV; v++) store(to + v * W, load(from + p * bp + v * W));
    } else if (width == NR && bp == 1) {
      for (; p + W <= k; p += W, to += W * NR)
        for (int v = 0; v < NV; v++) transpose(from + v * W * bj + p, bj, to + v * W);
    }
    for (; p < k; p++, to += NR)
      for (int64_t x = 0; x < NR; x++) to[x] = x < width ? from[p * bp + x * bj] : 0.0f;
    std::fill_n(to, pad * NR, 0.0f);
    to += pad * NR;
  }
}

}  // namespace xtf
