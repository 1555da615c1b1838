// Products of groups: c[g] = a[g] b[g], all at once, cut into blocks that the threads take as they come.
#pragma once
#include <vector>
#include "gemm.h"

namespace xtf {

struct Product {
  const float *a, *b;
  float* c;
  int64_t m, n, k;
  int64_t ai, ap;  // how far rows and columns of a are apart; one of both is 1
  int64_t bp, bj;  // and those of b
  int64_t ldc;
};

// Blocks that the caches hold: NC columns of b, MC rows of a, of an inner dimension of IN_PLACE, or PACKED where a is packed.
constexpr int64_t IN_PLACE = 512, PACKED = 256, NC = 256, MC = 36 * MR;
constexpr int64_t BUFFER = IN_PLACE * NR + PACKED * MC + W;

// Blocks of rows [block][k][rows], for a left factor whose columns are dense.
inline void pack_rows(const float* a, int64_t ap, int64_t k, int64_t m, float* to) {
  const int64_t count = blocks_of(m);
  for (int64_t t = 0; t < count; t++) {
    const int64_t i = begin_of(m, count, t), rows = begin_of(m, count, t + 1) - i;
    float* block = to + i * k;
    for (int64_t p = 0; p < k; p++) {
      const float* from = a + i + p * ap;
      if (i + W <= m) {  // what is written past the block is written again by what comes after it
        store(block + p * rows, load(from));
      } else {
        std::copy_n(from, rows, block + p * rows);
      }
    }
  }
}

template <Write how>
void part(const Product& q, int64_t row, int64_t m, int64_t column, int64_t n, int64_t first, int64_t k, float* buffer) {
  const float* a = q.a + row * q.ai + first * q.ap;
  float* rows = buffer + IN_PLACE * NR;
  const bool packed = q.ap != 1;
  if (packed) pack_rows(a, q.ap, k, m, rows);
  const int64_t count = blocks_of(m);
  for (int64_t j = column; j < column + n; j += NR) {
    const int64_t width = std::min<int64_t>(NR, column + n - j);
    pack(q.b + first * q.bp + j * q.bj, q.bp, q.bj, k, width, buffer);

    float* c = q.c + row * q.ldc + j;
    for (int64_t t = 0; t < count; t++) {
      const int64_t i = begin_of(m, count, t), size = begin_of(m, count, t + 1) - i;
      if (packed) product<how>(size, width, k, rows + i * k, 1, size, buffer, 0, c + i * q.ldc, q.ldc);
      else product<how>(size, width, k, a + i * q.ai, q.ai, 1, buffer, 0, c + i * q.ldc, q.ldc);
    }
  }
}

inline void block(const Product& q, int64_t row, int64_t m, int64_t column, int64_t n, bool past, float* buffer) {
  const int64_t most = q.ap == 1 ? IN_PLACE : PACKED, parts = std::max<int64_t>(1, (q.k + most - 1) / most);
  for (int64_t index = 0; index < parts; index++) {  // an empty inner dimension writes zeros
    const int64_t first = begin_of(q.k, parts, index), k = begin_of(q.k, parts, index + 1) - first;
    if (first > 0) part<Write::add>(q, row, m, column, n, first, k, buffer);
    else if (past && q.k <= most) part<Write::past>(q, row, m, column, n, first, k, buffer);
    else part<Write::over>(q, row, m, column, n, first, k, buffer);
  }
}

struct Task {
  int64_t group, row, m, column, n;
};

inline void run(const std::vector<Product>& products, bool past, int64_t threads) {
  std::vector<Task> tasks;
  for (size_t group = 0; group < products.size(); group++) {
    const Product& q = products[group];
    const int64_t cuts = (q.m + MC - 1) / MC;
    for (int64_t t = 0; t < cuts; t++) {
      const int64_t row = begin_of(q.m, cuts, t), m = begin_of(q.m, cuts, t + 1) - row;
      for (int64_t column = 0; column < q.n; column += NC)
        tasks.push_back({static_cast<int64_t>(group), row, m, column, std::min(NC, q.n - column)});
    }
  }
#pragma omp parallel num_threads(threads)
  {
    thread_local std::vector<float> buffer;
    buffer.resize(BUFFER);
#pragma omp for schedule(dynamic, 1)
    for (size_t z = 0; z < tasks.size(); z++) {
      const Task& t = tasks[z];
      block(products[t.group], t.row, t.m, t.column, t.n, past, buffer.data());
    }
#if defined(__SSE__)
    if (past) __builtin_ia32_sfence();
#endif
  }
}

struct Grouped {  // as xtf/ops/native/__init__.py fills it; all matrices are dense
  const float *a, *b;
  float* out;
  const int32_t* ends;  // the end row of each group
  int64_t rows, groups, inner, outer;  // w is (groups, outer, inner)
  int64_t kind, threads;
};

enum Kind { forward_product, dx_product, dw_product };

// False where the groups do not lie behind each other inside the rows.
inline bool grouped(const Grouped& t) {
  std::vector<Product> products;
  const int64_t inner = t.inner, outer = t.outer;
  int64_t begin = 0;
  for (int64_t group = 0; group < t.groups; group++) {
    const int64_t end = t.ends[group], m = end - begin;
    if (m < 0 || end > t.rows) return false;
    const int64_t w = group * outer * inner;
    if (t.kind == forward_product)  // out (rows, outer) = x (rows, inner) w^T
      products.push_back({t.a + begin * inner, t.b + w, t.out + begin * outer, m, outer, inner, inner, 1, 1, inner, outer});
    else if (t.kind == dx_product)  // dx (rows, inner) = dout (rows, outer) w
      products.push_back({t.a + begin * outer, t.b + w, t.out + begin * inner, m, inner, outer, outer, 1, inner, 1, inner});
    else  // dw (outer, inner) = dout^T (outer, rows) x (rows, inner), zeros without rows
      products.push_back({t.a + begin * outer, t.b + begin * inner, t.out + w, outer, inner, m, 1, outer, inner, 1, inner});
    begin = end;
  }
  run(products, t.kind == dw_product, t.threads);
  return true;
}

}  // namespace xtf
