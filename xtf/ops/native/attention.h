// Attention inside documents, block by block with a running softmax, after Dao (2023), "FlashAttention-2".
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>
#include "gemm.h"

namespace xtf {

struct Attention {  // as xtf/ops/native/__init__.py fills it; sizes and strides count numbers, and head sizes are dense
  const float *q, *k, *v;
  const int32_t* bounds;
  int64_t tokens, documents, heads, kv_heads, d, dv;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  float scale;
  int64_t window;  // keys that a query sees, itself included
  float *out, *logsumexp;  // dense: (T, heads, dv), (T, heads)
  // the backward's
  const float* dout;  // (T, heads, dv), dense
  float *dq, *dk, *dv_grad;  // dense, of the shapes of q, k and v
  float* scratch;
  int64_t threads;
};

constexpr int64_t BQ = 8 * MR, BK = 8 * NR;  // queries and keys of a block

// e^x for x <= 88, relative error about 1e-7, 0 below -87; NaN stays NaN. Cephes' way: 2^n times a polynomial on half an octave.
inline Vector exponential(Vector x) {
  const Vector low = Vector{} - 87.0f;
  const Vector y = x < low ? low : x;
  const Vector magic = Vector{} + 12582912.0f;  // adding it rounds to a whole number
  const Vector shifted = y * 1.44269504088896341f + magic;
  const Vector n = shifted - magic;
  const Vector r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector e = Vector{} + 1.9875691500e-4f;
  e = e * r + 1.3981999507e-3f;
  e = e * r + 8.3334519073e-3f;
  e = e * r + 4.1665795894e-2f;
  e = e * r + 1.6666665459e-1f;
  e = e * r + 5.0000001201e-1f;
  e = e * (r * r) + r + 1.0f;
  const Ints power = ((Ints)shifted - 0x4B400000 + 127) << 23;
  e = e * (Vector)power;
  e = x < low ? Vector{} : e;
  return x == x ? e : x;
}

inline float sum(Vector v) {
  float total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
}

inline float largest(Vector v) {
  float found = v[0];
  for (int i = 1; i < W; i++) found = v[i] > found ? v[i] : found;
  return found;
}

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Keys and values of each document and key head, packed once for all queries.
struct Packed {
  std::vector<int64_t> first;  // first padded row of each document; at the end their sum
  int64_t d_up, dv_up;

  explicit Packed(const Attention& t) : d_up(up(t.d, NR)), dv_up(up(t.dv, NR)) {
    int64_t rows = 0;
    for (int64_t i = 0; i < t.documents; i++) {
      first.push_back(rows);
      rows += up(t.bounds[i + 1] - t.bounds[i], NR);
    }
    first.push_back(rows);
  }
  int64_t rows() const { return first.back(); }
  int64_t rows(int64_t document) const { return first[document + 1] - first[document]; }
  // A region of `width` numbers for each padded row and key head, head by head inside a document.
  float* at(float* region, const Attention& t, int64_t width, int64_t document, int64_t head) const {
    return region + (first[document] * t.kv_heads + head * rows(document)) * width;
  }
};

// Scores of queries and keys from these on: those of hidden pairs become minus infinity.
inline void hide(float* scores, int64_t m, int64_t columns, int64_t query, int64_t key, int64_t window) {
  if (query >= key + columns - 1 && query + m <= key + window) return;
  for (int64_t i = 0; i < m; i++) {
    float* row = scores + i * BK;
    const int64_t at = query + i;
    const int64_t begin = std::clamp<int64_t>(at - window + 1 - key, 0, columns), end = std::clamp<int64_t>(at + 1 - key, begin, columns);
    std::fill(row, row + begin, -std::numeric_limits<float>::infinity());
    std::fill(row + end, row + columns, -std::numeric_limits<float>::infinity());
  }
}

inline int64_t first_key(int64_t query, int64_t window) { return std::max<int64_t>(0, query - window + 1) / NR * NR; }

inline void forward_block(const Attention& t, const float* keys, const float* values, int64_t rows, int64_t row0, int64_t head, int64_t query, int64_t m) {
  alignas(64) float scores[MR * BK];
  thread_local std::vector<float> mixed_store;
  const int64_t dv_up = up(t.dv, NR);
  mixed_store.assign(BQ * dv_up, 0.0f);
  float* mixed = mixed_store.data();
  float most[BQ], total[BQ];
  std::fill_n(most, m, -1e30f);
  std::fill_n(total, m, 0.0f);
  const float* q = t.q + (row0 + query) * t.q_row + head * t.q_head;
  const int64_t strips = blocks_of(m);
  for (int64_t key = first_key(query, t.window); key < query + m; key += BK)
    for (int64_t strip = 0; strip < strips; strip++) {
      const int64_t begin = begin_of(m, strips, strip), end = begin_of(m, strips, strip + 1), size = end - begin;
      const int64_t columns = std::min<int64_t>(BK, up(query + end - key, NR));
      if (columns <= 0) continue;
      product<Write::over>(size, columns, t.d, q + begin * t.q_row, t.q_row, 1, keys + key * t.d, t.d * NR, scores, BK);
      hide(scores, size, columns, query + begin, key, t.window);
      for (int64_t i = begin; i < end; i++) {
        float* row = scores + (i - begin) * BK;
        Vector top = Vector{} - 1e30f;
        for (int64_t j = 0; j < columns; j += W) top = larger(load(row + j), top);
        const float before = most[i], now = std::max(before, largest(top) * t.scale);
        Vector sums = {};
        for (int64_t j = 0; j < columns; j += W) {
          const Vector weight = exponential(load(row + j) * t.scale - now);
          sums += weight;
          store(row + j, weight);
        }
        if (now > before) {
          const float factor = std::exp(before - now);
          total[i] *= factor;
          for (int64_t j = 0; j < dv_up; j += W) store(mixed + i * dv_up + j, load(mixed + i * dv_up + j) * factor);
          most[i] = now;
        }
        total[i] += sum(sums);
      }
      product<Write::add>(size, dv_up, columns, scores, BK, 1, values + key * NR, rows * NR, mixed + begin * dv_up, dv_up);
    }
  for (int64_t i = 0; i < m; i++) {
    float* to = t.out + ((row0 + query + i) * t.heads + head) * t.dv;
    const float factor = 1.0f / total[i];
    for (int64_t j = 0; j < t.dv; j++) to[j] = mixed[i * dv_up + j] * factor;
    t.logsumexp[(row0 + query + i) * t.heads + head] = most[i] + std::log(total[i]);
  }
}

struct Block {
  int64_t document, head, query, m;
};

inline int64_t forward_scratch(const Attention& t) {
  const Packed packed(t);
  return packed.rows() * t.kv_heads * (t.d + packed.dv_up);
}

// Documents must lie behind each other inside the T tokens.
inline bool sound(const Attention& t) {
  for (int64_t i = 0; i < t.documents; i++)
    if (t.bounds[i + 1] < t.bounds[i]) return false;
  return t.documents >= 0 && t.bounds[0] >= 0 && t.bounds[t.documents] <= t.tokens;
}

inline void forward(const Attention& t) {
  const Packed packed(t);
  float *keys = t.scratch, *values = keys + packed.rows() * t.kv_heads * t.d;
  std::vector<Block> blocks;
  for (int64_t i = 0; i < t.documents; i++) {
    const int64_t length = t.bounds[i + 1] - t.bounds[i];
    for (int64_t query = (length - 1) / BQ * BQ; length && query >= 0; query -= BQ)  // the long ones first
      for (int64_t head = 0; head < t.heads; head++) blocks.push_back({i, head, query, std::min(BQ, length - query)});
  }
#pragma omp parallel num_threads(t.threads)
  {
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t i = 0; i < t.documents; i++)
      for (int64_t head = 0; head < t.kv_heads; head++) {
        const int64_t row0 = t.bounds[i], length = t.bounds[i + 1] - row0, pad = packed.rows(i) - length;
        pack(t.k + row0 * t.k_row + head * t.k_head, 1, t.k_row, t.d, length, packed.at(keys, t, t.d, i, head));
        pack(t.v + row0 * t.v_row + head * t.v_head, t.v_row, 1, length, t.dv, packed.at(values, t, packed.dv_up, i, head), pad);
      }
#pragma omp for schedule(dynamic, 1)
    for (size_t z = 0; z < blocks.size(); z++) {
      const Block& b = blocks[z];
      const int64_t kv = b.head / (t.heads / t.kv_heads);
      forward_block(t, packed.at(keys, t, t.d, b.document, kv), packed.at(values, t, packed.dv_up, b.document, kv), packed.rows(b.document),
                    t.bounds[b.document], b.head, b.query, b.m);
    }
  }
}

// Gradients of keys and values are sums over the queries of a document and key head: one thread takes all of them, or, where that leaves
// threads without work, a segment of the queries, with sums of its own that are added up at the end, in order.
struct Segment {
  int64_t document, head, begin, end, number;
};

inline int64_t segments_of(const Attention& t, int64_t length) {
  if (length < 8 * BQ) return 1;
  const int64_t whole = std::max<int64_t>(1, t.documents * t.kv_heads);
  return std::min<int64_t>((2 * t.threads + whole - 1) / whole, length / (4 * BQ));
}

inline int64_t most_segments(const Attention& t) {
  int64_t most = 1;
  for (int64_t i = 0; i < t.documents; i++) most = std::max(most, segments_of(t, t.bounds[i + 1] - t.bounds[i]));
  return most;
}

inline int64_t sums_of(const Attention& t) { return t.bounds[t.documents] * t.kv_heads * (t.d + t.dv); }

inline int64_t backward_scratch(const Attention& t) {
  const Packed packed(t);
  return packed.rows() * t.kv_heads * (t.d + t.dv + packed.d_up) + (most_segments(t) - 1) * sums_of(t);
}

inline void backward_segment(const Attention& t, const float* keys_t, const float* values_t, const float* keys, int64_t rows, const Segment& s,
                             float* dk, float* dv) {
  alignas(64) float weights[BQ * BK], grads[BQ * BK];
  const int64_t d_up = up(t.d, NR), dv_up = up(t.dv, NR), group = t.heads / t.kv_heads;
  const int64_t row0 = t.bounds[s.document], length = t.bounds[s.document + 1] - row0;
  const int64_t k_row = t.kv_heads * t.d, v_row = t.kv_heads * t.dv, dout_row = t.heads * t.dv, dq_row = t.heads * t.d;
  thread_local std::vector<float> store_;
  store_.resize(BQ * (d_up + dv_up));
  float *queries = store_.data(), *douts = queries + BQ * d_up;
  for (int64_t head = s.head * group; head < (s.head + 1) * group; head++)
    for (int64_t query = s.begin; query < s.end; query += BQ) {
      const int64_t m = std::min(BQ, s.end - query);
      const float* q = t.q + (row0 + query) * t.q_row + head * t.q_head;
      const float* dout = t.dout + (row0 + query) * dout_row + head * t.dv;
      float* dq = t.dq + (row0 + query) * dq_row + head * t.d;
      float delta[BQ], lse[BQ];
      for (int64_t i = 0; i < m; i++) {
        const float *a = dout + i * dout_row, *b = t.out + ((row0 + query + i) * t.heads + head) * t.dv;
        float total = 0;
        int64_t j = 0;
        Vector sums = {};
        for (; j + W <= t.dv; j += W) sums += load(a + j) * load(b + j);
        for (; j < t.dv; j++) total += a[j] * b[j];
        delta[i] = total + sum(sums);
        lse[i] = t.logsumexp[(row0 + query + i) * t.heads + head];
      }
      pack(q, t.q_row, 1, m, t.d, queries);
      pack(dout, dout_row, 1, m, t.dv, douts);
      const int64_t strips = blocks_of(m), first = first_key(query, t.window);
      for (int64_t key = first; key < query + m; key += BK) {
        const int64_t all = std::min<int64_t>(BK, up(query + m - key, NR));
        for (int64_t strip = 0; strip < strips; strip++) {
          const int64_t begin = begin_of(m, strips, strip), end = begin_of(m, strips, strip + 1), size = end - begin;
          const int64_t columns = std::clamp<int64_t>(up(query + end - key, NR), 0, BK);
          for (int64_t i = begin; i < end; i++) {
            std::fill(weights + i * BK + columns, weights + i * BK + all, 0.0f);
            std::fill(grads + i * BK + columns, grads + i * BK + all, 0.0f);
          }
          if (columns == 0) continue;
          float *weight = weights + begin * BK, *grad = grads + begin * BK;
          product<Write::over>(size, columns, t.d, q + begin * t.q_row, t.q_row, 1, keys_t + key * t.d, t.d * NR, weight, BK);
          product<Write::over>(size, columns, t.dv, dout + begin * dout_row, dout_row, 1, values_t + key * t.dv, t.dv * NR, grad, BK);
          hide(weight, size, columns, query + begin, key, t.window);
          for (int64_t i = begin; i < end; i++) {
            float *row = weights + i * BK, *slope = grads + i * BK;
            for (int64_t j = 0; j < columns; j += W) {
              const Vector value = exponential(load(row + j) * t.scale - lse[i]);
              store(row + j, value);
              store(slope + j, value * (load(slope + j) - delta[i]) * t.scale);
            }
          }
          float* to = dq + begin * dq_row;
          if (key == first) product<Write::over>(size, t.d, columns, grad, BK, 1, keys + key * NR, rows * NR, to, dq_row);
          else product<Write::add>(size, t.d, columns, grad, BK, 1, keys + key * NR, rows * NR, to, dq_row);
        }
        // Keys by queries that may see them: from the key's own strip on, whose hidden pairs have the weight 0.
        const int64_t seen = std::min({BK, query + m - key, length - key}), blocks = blocks_of(seen);
        for (int64_t block = 0; block < blocks; block++) {
          const int64_t at = begin_of(seen, blocks, block), size = begin_of(seen, blocks, block + 1) - at;
          int64_t from = 0;
          for (int64_t strip = 0; strip < strips && query + begin_of(m, strips, strip + 1) <= key + at; strip++)
            from = begin_of(m, strips, strip + 1);
          product<Write::add>(size, t.dv, m - from, weights + from * BK + at, 1, BK, douts + from * NR, m * NR, dv + (key + at) * v_row, v_row);
          product<Write::add>(size, t.d, m - from, grads + from * BK + at, 1, BK, queries + from * NR, m * NR, dk + (key + at) * k_row, k_row);
        }
      }
    }
}

inline void backward(const Attention& t) {
  const Packed packed(t);
  const int64_t padded = packed.rows() * t.kv_heads, tokens = t.bounds[t.documents];
  float *keys_t = t.scratch, *values_t = keys_t + padded * t.d, *keys = values_t + padded * t.dv, *sums = keys + padded * packed.d_up;
  const int64_t others = most_segments(t) - 1, dk_size = tokens * t.kv_heads * t.d, dv_size = tokens * t.kv_heads * t.dv;
  std::vector<Segment> segments;
  for (int64_t i = 0; i < t.documents; i++) {
    const int64_t length = t.bounds[i + 1] - t.bounds[i], count = segments_of(t, length);
    for (int64_t n = count - 1; length && n >= 0; n--) {  // as many pairs in each
      auto edge = [&](int64_t at) { return at == count ? length : up(static_cast<int64_t>(length * std::sqrt(double(at) / count)), BQ); };
      const int64_t begin = std::min(edge(n), length), end = std::min(edge(n + 1), length);
      for (int64_t head = 0; begin < end && head < t.kv_heads; head++) segments.push_back({i, head, begin, end, n});
    }
  }
  std::stable_sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) {
    return (a.end - a.begin) * (a.end + a.begin) > (b.end - b.begin) * (b.end + b.begin);
  });
#pragma omp parallel num_threads(t.threads)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++) {
      std::fill_n(t.dk + row * t.kv_heads * t.d, t.kv_heads * t.d, 0.0f);
      std::fill_n(t.dv_grad + row * t.kv_heads * t.dv, t.kv_heads * t.dv, 0.0f);
      for (int64_t n = 0; n < others; n++) {
        std::fill_n(sums + n * (dk_size + dv_size) + row * t.kv_heads * t.d, t.kv_heads * t.d, 0.0f);
        std::fill_n(sums + n * (dk_size + dv_size) + dk_size + row * t.kv_heads * t.dv, t.kv_heads * t.dv, 0.0f);
      }
    }
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t i = 0; i < t.documents; i++)
      for (int64_t head = 0; head < t.kv_heads; head++) {
        const int64_t row0 = t.bounds[i], length = t.bounds[i + 1] - row0, pad = packed.rows(i) - length;
        const float *k = t.k + row0 * t.k_row + head * t.k_head, *v = t.v + row0 * t.v_row + head * t.v_head;
        pack(k, 1, t.k_row, t.d, length, packed.at(keys_t, t, t.d, i, head));
        pack(v, 1, t.v_row, t.dv, length, packed.at(values_t, t, t.dv, i, head));
        pack(k, t.k_row, 1, length, t.d, packed.at(keys, t, packed.d_up, i, head), pad);
      }
#pragma omp for schedule(dynamic, 1)
    for (size_t z = 0; z < segments.size(); z++) {
      const Segment& s = segments[z];
      float* dk = s.number ? sums + (s.number - 1) * (dk_size + dv_size) : t.dk;
      float* dv = s.number ? sums + (s.number - 1) * (dk_size + dv_size) + dk_size : t.dv_grad;
      backward_segment(t, packed.at(keys_t, t, t.d, s.document, s.head), packed.at(values_t, t, t.dv, s.document, s.head),
                       packed.at(keys, t, packed.d_up, s.document, s.head), packed.rows(s.document), s,
                       dk + (t.bounds[s.document] * t.kv_heads + s.head) * t.d, dv + (t.bounds[s.document] * t.kv_heads + s.head) * t.dv);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < tokens; row++)
      for (int64_t n = 0; n < others; n++) {
        const float* part = sums + n * (dk_size + dv_size);
        for (int64_t j = row * t.kv_heads * t.d; j < (row + 1) * t.kv_heads * t.d; j++) t.dk[j] += part[j];
        for (int64_t j = row * t.kv_heads * t.dv; j < (row + 1) * t.kv_heads * t.dv; j++) t.dv_grad[j] += part[dk_size + j];
      }
  }
}

}  // namespace xtf
