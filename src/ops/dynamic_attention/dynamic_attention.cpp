// Attention over keys known only on the device: what it accepts, and which backend runs it.
#include "fretwork/dynamic_attention.h"

#include <algorithm>
#include <string>

#include "core/divide.h"
#include "fretwork/error.h"
#include "fretwork/patterns.h"
#include "ops/attention/checks.h"
#include "ops/dynamic_attention/problem.h"
#include "pattern/checks.h"

namespace fretwork {
namespace {

using dynamic_attention_op::BackwardProblem;
using dynamic_attention_op::Form;
using dynamic_attention_op::Keys;
using dynamic_attention_op::Problem;
using dynamic_attention_op::Table;

Form form_of(const DeviceKeys& keys) {
  return keys.cu_q.has_value()       ? Form::documents
         : keys.selected.has_value() ? Form::selected
         : keys.indices.has_value()  ? Form::lists
                                     : Form::mask;
}

const char* op_of(Form form) {
  return form == Form::documents ? "varlen_attention" : form == Form::selected ? "selected_attention" : "attention";
}

void check_block(const char* op, std::int64_t side) {
  if (side != 16 && side != 32 && side != 64 && side != 128) {
    throw Error(op, "block", "16, 32, 64 or 128", std::to_string(side));
  }
}

Table table(const char* op, const char* argument, const ConstTensorView& t, DType dtype, const Context& context) {
  if (t.dtype != dtype) {
    throw Error(op, argument, name_of(dtype), name_of(t.dtype));
  }
  check_device(op, argument, t, context);
  return {t.data, t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

/// A table for blocks: its sizes are 1 or those of the problem.
void check_lists(const char* op, const char* argument, const ConstTensorView& t, int rank,
                 const attention_op::Problem& p, Keys& keys) {
  const bool right = t.rank == rank && (t.size(0) == 1 || t.size(0) == p.batch) &&
                     (t.size(1) == 1 || t.size(1) == p.heads || t.size(1) == p.kv_heads) && t.size(2) == keys.rows &&
                     (t.dtype != DType::boolean || t.size(3) == keys.cols);
  if (!right) {
    throw Error(op, argument,
                "(B or 1, Hq, Hk or 1, " + std::to_string(keys.rows) + ", …) for " + std::to_string(keys.rows) + " × " +
                    std::to_string(keys.cols) + " blocks",
                shape_text(t.shape()));
  }
  keys.batch = t.size(0);
  keys.heads = t.size(1);
}

void check_blocks(const char* op, const DeviceKeys& given, const attention_op::Problem& p, const Context& context,
                  Keys& keys) {
  check_block(op, given.block_rows);
  check_block(op, given.block_cols);
  keys.block_rows = given.block_rows;
  keys.block_cols = given.block_cols;
  keys.rows = ceil_div(p.rows, keys.block_rows);
  keys.cols = ceil_div(p.cols, keys.block_cols);
  if (keys.form == Form::mask) {
    if (!given.mask.has_value()) {
      throw Error(op, "blocks", "a mask or lists", "none");
    }
    check_lists(op, "blocks", *given.mask, 4, p, keys);
    keys.mask = table(op, "blocks", *given.mask, DType::boolean, context);
    return;
  }
  if (!given.counts.has_value()) {
    throw Error(op, "counts", "counts with indices", "none");
  }
  check_lists(op, "counts", *given.counts, 3, p, keys);
  check_lists(op, "indices", *given.indices, 4, p, keys);
  if (!std::ranges::equal(given.counts->shape(), given.indices->shape().first(3))) {
    throw Error(op, "counts", "the first sizes of indices", shape_text(given.counts->shape()));
  }
  keys.counts = table(op, "counts", *given.counts, DType::i32, context);
  keys.indices = table(op, "indices", *given.indices, DType::i32, context);
  keys.entries = given.indices->size(3);
}

void check_selected(const char* op, const DeviceKeys& given, const attention_op::Problem& p, const Context& context,
                    Keys& keys) {
  const ConstTensorView& t = *given.selected;
  check_block(op, given.block_cols);
  if (t.rank != 4 || t.size(0) != p.batch || t.size(1) != p.kv_heads || t.size(2) != p.rows) {
    throw Error(
        op, "indices",
        "(" + std::to_string(p.batch) + ", " + std::to_string(p.kv_heads) + ", " + std::to_string(p.rows) + ", T)",
        shape_text(t.shape()));
  }
  keys.block_cols = given.block_cols;
  keys.rows = p.rows;
  keys.cols = ceil_div(p.cols, keys.block_cols);
  keys.batch = p.batch;
  keys.heads = p.kv_heads;
  keys.indices = table(op, "indices", t, DType::i32, context);
  keys.entries = t.size(3);
}

void check_documents(const char* op, const DeviceKeys& given, const attention_op::Problem& p, const Context& context,
                     Keys& keys) {
  const ConstTensorView& cu_q = *given.cu_q;
  const ConstTensorView& cu_k = given.cu_k.value_or(cu_q);
  if (cu_q.rank != 1 || cu_q.size(0) < 1) {
    throw Error(op, "cu_q", "one dimension and at least one entry", shape_text(cu_q.shape()));
  }
  if (cu_k.rank != 1 || cu_k.size(0) != cu_q.size(0)) {
    throw Error(op, "cu_k", "shape " + shape_text(cu_q.shape()) + " like cu_q", shape_text(cu_k.shape()));
  }
  if (p.batch != 1) {
    throw Error(op, "q", "a batch of 1", std::to_string(p.batch));
  }
  keys.cu_q = table(op, "cu_q", cu_q, DType::i32, context);
  keys.cu_k = table(op, "cu_k", cu_k, DType::i32, context);
  keys.documents = cu_q.size(0) - 1;
  const auto bound = [&](const char* argument, const std::optional<std::int64_t>& x, std::int64_t none) {
    if (x.has_value() && *x < 0) {
      throw Error(op, argument, "0 or more", std::to_string(*x));
    }
    return x.value_or(none);
  };
  const std::int64_t far = p.rows + p.cols;  // no key is farther from a query; sums with larger bounds have no room
  keys.left = std::min(bound("window", given.left, -1), far);
  keys.right = std::min(bound("window", given.right, -1), far);
  if (given.causal) {
    keys.right = 0;
  }
  keys.max_q = std::min(bound("max_q", given.max_q, p.rows), p.rows);
  keys.max_k = std::min(bound("max_k", given.max_k, p.cols), p.cols);
}

/// Selections and documents have no pattern but what their flags say.
PatternPtr pattern_for(Form form, const PatternPtr& pattern, const DeviceKeys& keys, const ConstTensorView& q,
                       const ConstTensorView& k) {
  if (pattern != nullptr) {
    return pattern;
  }
  const patterns::Seq seq{q.size(2), k.size(2)};
  return form == Form::selected && keys.causal ? PatternPtr(patterns::causal(seq)) : PatternPtr(patterns::full(seq));
}

/// That keys are named in one way.
void check_form(const char* op, Form form, const PatternPtr& pattern, const DeviceKeys& keys) {
  const bool lists = keys.counts.has_value() || keys.indices.has_value();
  const bool documents = keys.cu_q.has_value() || keys.cu_k.has_value();
  const int forms =
      (keys.mask.has_value() ? 1 : 0) + (lists ? 1 : 0) + (keys.selected.has_value() ? 1 : 0) + (documents ? 1 : 0);
  if (forms > 1) {
    throw Error(op, "keys", "one of a mask, lists, a selection and documents", std::to_string(forms) + " of them");
  }
  if (keys.cu_k.has_value() && !keys.cu_q.has_value()) {
    throw Error(op, "cu_q", "where the documents of queries begin, beside cu_k", "none");
  }
  const auto refuse = [&](const char* argument, const char* expected, bool given) {
    if (given) {
      throw Error(op, argument, expected, "one");
    }
  };
  const bool blocks = form == Form::mask || form == Form::lists;
  refuse("pattern", "none but with blocks", pattern != nullptr && !blocks);
  refuse("window", "none but with documents", (keys.left || keys.right) && form != Form::documents);
  if (keys.causal && blocks) {
    throw Error(op, "causal", "a pattern that says so with blocks", "true");
  }
}

/// What the kernels would not look at.
void check_options(const char* op, Form form, const AttentionOptions& options) {
  const bool blocks = form == Form::mask || form == Form::lists;
  const auto refuse = [&](const char* argument, bool given) {
    if (given) {
      throw Error(op, argument, "none with a selection or documents", "one");
    }
  };
  refuse("bias", !blocks && options.bias.has_value());
  refuse("slopes", !blocks && options.slopes.has_value());
  refuse("softcap", !blocks && options.softcap > 0);
  refuse("dropout", !blocks && options.dropout > 0);
  refuse("key_padding_mask", !blocks && options.key_padding.has_value());
}

Problem check(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const PatternPtr& pattern,
              const DeviceKeys& keys, const ConstTensorView& out, const std::optional<ConstTensorView>& lse,
              Context& context, const AttentionOptions& options) {
  const Form form = form_of(keys);
  const char* const op = op_of(form);
  check_form(op, form, pattern, keys);
  check_options(op, form, options);
  const PatternPtr used = pattern_for(form, pattern, keys, q, k);
  Problem p{attention_op::check_call(op, q, k, v, std::span(&used, 1), out, lse, context, options), {}};
  p.keys.form = form;
  form == Form::documents  ? check_documents(op, keys, p.attention, context, p.keys)
  : form == Form::selected ? check_selected(op, keys, p.attention, context, p.keys)
                           : check_blocks(op, keys, p.attention, context, p.keys);
  if (form != Form::documents) {
    dynamic_attention_op::intervals_of(op, *p.attention.patterns[0]);
  }
  return p;
}

}  // namespace

void dynamic_attention(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                       const PatternPtr& pattern, const DeviceKeys& keys, const TensorView& out,
                       const std::optional<TensorView>& lse, Context& context, const AttentionOptions& options) {
  Problem p = check(q, k, v, pattern, keys, out, lse, context, options);
  const std::int64_t statistics = p.attention.batch * p.attention.heads * p.attention.rows;
  if (statistics == 0) {
    return;
  }
  const std::size_t size = p.attention.dtype == DType::f64 ? 8 : 4;
  const Workspace unseen(context, lse.has_value() ? 0 : static_cast<std::size_t>(statistics) * size);
  if (!lse.has_value()) {
    p.attention.lse = {unseen.data(), p.attention.heads * p.attention.rows, p.attention.rows, 1, 0};
  }
  context.device.type == DeviceType::cuda ? dynamic_attention_op::cuda::forward(p, context)
                                          : dynamic_attention_op::cpu::forward(p, context);
}

void dynamic_attention_backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                                const PatternPtr& pattern, const DeviceKeys& keys, const ConstTensorView& out,
                                const ConstTensorView& lse, const ConstTensorView& d_out,
                                const std::optional<ConstTensorView>& d_lse, const AttentionGradients& gradients,
                                Context& context, const AttentionOptions& options) {
  const Problem p = check(q, k, v, pattern, keys, out, lse, context, options);
  BackwardProblem b{attention_op::check_gradients(p.attention, d_out, d_lse, gradients, context, options), p.keys};
  if (p.attention.heads == 0) {  // then there is no batch either: backends divide by the number of heads
    b.attention.forward.batch = 0;
    b.attention.forward.heads = b.attention.forward.kv_heads = 1;
    b.attention.forward.sinks = b.attention.d_sinks = {};
  }
  context.device.type == DeviceType::cuda ? dynamic_attention_op::cuda::backward(b, context)
                                          : dynamic_attention_op::cpu::backward(b, context);
}

}  // namespace fretwork
