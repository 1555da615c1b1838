// What xtf/ops/native/__init__.py calls. Functions return 0 where the documents or groups do not lie behind each other.
#include "attention.h"
#include "grouped_mm.h"

extern "C" {

int xtf_width() { return xtf::W; }
int xtf_grouped_mm(const xtf::Grouped* t) { return xtf::grouped(*t); }

// Numbers of working memory, or a negative number.
int64_t xtf_attention_scratch(const xtf::Attention* t, int backward) {
  if (!xtf::sound(*t)) return -1;
  return backward ? xtf::backward_scratch(*t) : xtf::forward_scratch(*t);
}
void xtf_attention(const xtf::Attention* t) { xtf::forward(*t); }
void xtf_attention_backward(const xtf::Attention* t) { xtf::backward(*t); }

// The sum of squares of each array, in double: of blocks that do not depend on the number of threads, added in order.
void xtf_square_sums(const float* const* arrays, const int64_t* sizes, int64_t count, double* out, int64_t threads) {
  constexpr int64_t SIZE = 1 << 14;
  constexpr int LANES = 4 * xtf::W;
  struct Part {
    const float *begin, *end;
    int64_t array;
  };
  std::vector<Part> parts;
  for (int64_t i = 0; i < count; i++)
    for (int64_t at = 0; at < sizes[i]; at += SIZE) parts.push_back({arrays[i] + at, arrays[i] + std::min(sizes[i], at + SIZE), i});
  std::vector<double> sums(parts.size());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t z = 0; z < parts.size(); z++) {
    const float *p = parts[z].begin, *end = parts[z].end;
    double lanes[LANES] = {};
    for (; p + LANES <= end; p += LANES)
      for (int i = 0; i < LANES; i++) lanes[i] += static_cast<double>(p[i]) * p[i];
    for (; p < end; p++) lanes[0] += static_cast<double>(*p) * *p;
    for (double lane : lanes) sums[z] += lane;
  }
  std::fill_n(out, count, 0.0);
  for (size_t z = 0; z < parts.size(); z++) out[parts[z].array] += sums[z];
}
}
