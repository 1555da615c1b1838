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
}
