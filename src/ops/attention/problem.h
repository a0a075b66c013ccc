// Attention after all checks: what both backends receive, and which batch elements and heads of it share a pattern.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/pattern.h"

namespace fretwork::attention_op {

/// (batch, head, row, column); strides in elements. Absent when data is null.
struct Operand {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
};

/// Added to the scores after scale and softcap; a stride is 0 where it is broadcast. Absent when data is null.
struct Bias {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
};

/// Which probabilities are dropped: a function of (*seed, batch, head, row, column) alone (device/random.cuh), so that
/// every tiling and both backends drop the same. Kept ones are divided by 1 − rate.
struct Dropout {
  double rate = 0;                     ///< 0: none
  const std::int64_t* seed = nullptr;  ///< on the context's device
};

/// Keys of each batch element that no query sees: those whose byte is not zero. Absent when data is null.
struct KeyPadding {
  const std::uint8_t* data = nullptr;
  std::int64_t batch = 0, col = 0;
  bool operator()(std::int64_t of, std::int64_t key) const { return data[of * batch + key * col] != 0; }
};

/// One more score for each query of a head, whose value is zero: it joins the sum. Absent when data is null.
struct Sinks {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t head = 0;
  std::int64_t row = 0;  ///< where heads are rows
};

struct Problem {
  DType dtype = DType::f32;
  std::int64_t batch = 0, heads = 0, kv_heads = 0;  ///< query head h uses key head h / (heads / kv_heads)
  std::int64_t first_batch = 0;                     ///< of a larger call's elements: dropout counts from there
  std::int64_t rows = 0, cols = 0;                  ///< queries, keys
  std::int64_t depth = 0, value_depth = 0;
  /// One for all heads, one for each query head, or one for each (batch element, query head). Equal ones are the same
  /// object.
  std::vector<RegularPtr> patterns;
  double scale = 1, softcap = 0;  ///< softcap 0: none
  Operand q, k, v;
  Operand o;    ///< forward: the result; backward: as it was
  Operand lse;  ///< (batch, head, row), col unused, f32 (f64 where dtype is): natural logarithm
  /// As lse: what its rounding left out, which matters to gradients where it is large. The CPU's forward writes it
  /// where it is given.
  Operand lse_rest;
  Bias bias;
  Operand slopes;  ///< ALiBi: of lse's type, by head only: −slope·|row + cols − rows − col| is added. Absent when data
                   ///< is null
  Dropout dropout;
  KeyPadding padding;
  Sinks sinks;
};

/// Gradients; absent ones (data null) are not wanted. d_lse may be absent: then it is zero.
struct BackwardProblem {
  Problem forward;
  Operand d_o, d_lse;     ///< given
  Operand d_q, d_k, d_v;  ///< of the forward's dtype; every element is written
  Bias d_bias;            ///< of the bias's shape: strides 0 where it is broadcast, and summed over there
  std::int64_t bias_sizes[4] = {1, 1, 1, 1};
  Sinks d_sinks;
  /// What each row of (batch, head, row) adds to d_sinks, in float: where the GPU's statistics leave it. Absent where
  /// d_sinks is.
  Operand sink_terms;
};

namespace cpu {
void forward(const Problem& problem, Context& context);
void backward(const BackwardProblem& problem, Context& context);
}  // namespace cpu
namespace cuda {
void forward(const Problem& problem, Context& context);
void backward(const BackwardProblem& problem, Context& context);
}  // namespace cuda

/// Neighbouring batch elements whose heads have the same things.
template <typename Thing>
struct BatchRange {
  std::int64_t first, count;
  std::span<const std::shared_ptr<const Thing>> things;  ///< one, or one for each head
};

/// `things`: one for all heads, one for each, or one for each (batch element, head); equal ones are the same object.
template <typename Thing>
std::vector<BatchRange<Thing>> batch_ranges(std::span<const std::shared_ptr<const Thing>> things, std::int64_t batch,
                                            std::int64_t heads) {
  if (batch == 1 || std::ssize(things) != batch * heads) {
    return {{0, batch, things}};
  }
  std::vector<BatchRange<Thing>> ranges;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto own = things.subspan(static_cast<std::size_t>(b * heads), static_cast<std::size_t>(heads));
    if (!ranges.empty() && std::ranges::equal(ranges.back().things, own)) {
      ++ranges.back().count;
    } else {
      ranges.push_back({b, 1, own});
    }
  }
  return ranges;
}

/// Heads with the same Thing, ascending.
template <typename Thing>
struct HeadSet {
  const Thing* thing;
  std::vector<int> heads;
};

/// `things`: one for all heads, or one for each; equal ones are the same object. Sets come in the order of their first
/// heads.
template <typename Thing>
std::vector<HeadSet<Thing>> head_sets(std::span<const std::shared_ptr<const Thing>> things, std::int64_t heads) {
  std::vector<HeadSet<Thing>> sets;
  for (int h = 0; h < heads; ++h) {
    const Thing* const thing = things[things.size() == 1 ? 0 : static_cast<std::size_t>(h)].get();
    auto set = std::find_if(sets.begin(), sets.end(), [&](const HeadSet<Thing>& s) { return s.thing == thing; });
    if (set == sets.end()) {
      set = sets.insert(set, {thing, {}});
      set->heads.reserve(static_cast<std::size_t>(heads - h));
    }
    set->heads.push_back(h);
  }
  return sets;
}

/// Neighbouring batch elements with the same patterns.
using PatternRange = BatchRange<RegularPattern>;
inline std::vector<PatternRange> ranges_of(const Problem& p) {
  return batch_ranges(std::span<const std::shared_ptr<const RegularPattern>>(p.patterns), p.batch, p.heads);
}

}  // namespace fretwork::attention_op
