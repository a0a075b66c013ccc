// Attention and its gradients in float64, element by element of a mask.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "device/random.cuh"

namespace fretwork {

/// What attention is computed from. Tensors are row-major (batch, head, row, column); an empty one is not there.
struct AttentionInputs {
  std::int64_t batch = 1, heads = 1, kv_heads = 1, rows = 0, cols = 0, depth = 0, value_depth = 0;
  std::function<bool(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j)> there;
  double scale = 1, softcap = 0, dropout = 0;
  std::int64_t seed = 0;
  std::vector<double> q{}, k{}, v{}, d_o{}, d_lse{}, bias{}, slopes{}, sinks{};
  std::array<std::int64_t, 4> bias_sizes{1, 1, 1, 1};  ///< each 1 or full
};

/// Nothing is read that the mask does not have. Without d_o there are no gradients.
class AttentionReference {
 public:
  std::vector<double> o, lse, d_q, d_k, d_v, d_bias, d_sinks;

  explicit AttentionReference(AttentionInputs inputs) : in_(std::move(inputs)) {
    o.resize(size(in_.batch * in_.heads * in_.rows * in_.value_depth));
    lse.resize(size(in_.batch * in_.heads * in_.rows));
    d_q.resize(in_.q.size());
    d_k.resize(in_.k.size());
    d_v.resize(in_.v.size());
    d_bias.resize(in_.bias.size());
    d_sinks.resize(in_.sinks.size());
    for (std::int64_t n = 0; n < in_.batch * in_.heads * in_.rows; ++n) {
      const Row row = attend(n);
      if (!in_.d_o.empty()) {
        differentiate(row);
      }
    }
  }

 private:
  struct Element {
    std::int64_t j = 0;
    std::int64_t key = 0;  ///< its row in k and v
    double p = 0;          ///< the score at first, then its weight
    double slope = 1;      ///< of the softcap
    double kept = 1;       ///< by dropout: 0, or what the weight is multiplied by
  };
  struct Row {
    std::int64_t number = 0, b = 0, h = 0, i = 0;  ///< number: in q and o
    std::vector<Element> elements;
  };

  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  std::size_t bias_at(const Row& row, std::int64_t j) const {
    const auto& s = in_.bias_sizes;
    const auto at = [&](std::size_t d, std::int64_t n) { return s[d] == 1 ? 0 : n; };
    return size(((at(0, row.b) * s[1] + at(1, row.h)) * s[2] + at(2, row.i)) * s[3] + at(3, j));
  }

  /// The element of a row with its score.
  Element scored(const Row& row, std::int64_t j) const {
    Element e;
    e.j = j;
    e.key = (row.b * in_.kv_heads + row.h / (in_.heads / in_.kv_heads)) * in_.cols + j;
    for (std::int64_t d = 0; d < in_.depth; ++d) {
      e.p += in_.q[size(row.number * in_.depth + d)] * in_.k[size(e.key * in_.depth + d)];
    }
    e.p *= in_.scale;
    if (in_.softcap > 0) {
      const double t = std::tanh(e.p / in_.softcap);
      e.p = in_.softcap * t;
      e.slope = 1 - t * t;
    }
    if (!in_.bias.empty()) {
      e.p += in_.bias[bias_at(row, j)];
    }
    if (!in_.slopes.empty()) {
      e.p -= in_.slopes[size(row.h)] * std::abs(static_cast<double>(row.i + in_.cols - in_.rows - j));
    }
    if (in_.dropout > 0) {
      const auto threshold = static_cast<std::uint64_t>(in_.dropout * 0x1p32);
      const bool kept = random_bits(random_row(in_.seed, row.b * in_.heads + row.h, row.i), j) >= threshold;
      e.kept = kept ? 1 / (1 - in_.dropout) : 0;
    }
    return e;
  }

  /// Row `number` of o and lse; a row without elements, or whose scores are all −∞, is empty.
  Row attend(std::int64_t number) {
    Row row{number, number / (in_.heads * in_.rows), number / in_.rows % in_.heads, number % in_.rows, {}};
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    for (std::int64_t j = 0; j < in_.cols; ++j) {
      if (in_.there(row.b, row.h, row.i, j)) {
        row.elements.push_back(scored(row, j));
        top = std::max(top, row.elements.back().p);
      }
    }
    const double sink = in_.sinks.empty() ? -std::numeric_limits<double>::infinity() : in_.sinks[size(row.h)];
    top = std::max(top, sink);
    lse[size(number)] = top;
    if (top == -std::numeric_limits<double>::infinity()) {
      row.elements.clear();
      return row;
    }
    for (const Element& e : row.elements) {
      total += std::exp(e.p - top);
    }
    total += std::exp(sink - top);
    lse[size(number)] += std::log(total);
    for (Element& e : row.elements) {
      e.p = std::exp(e.p - top) / total;
      for (std::int64_t d = 0; d < in_.value_depth; ++d) {
        o[size(number * in_.value_depth + d)] += e.p * e.kept * in_.v[size(e.key * in_.value_depth + d)];
      }
    }
    return row;
  }

  /// Adds what a row gives to the gradients.
  void differentiate(const Row& row) {
    std::vector<double> d_p(row.elements.size());
    double delta = in_.d_lse.empty() ? 0 : -in_.d_lse[size(row.number)];
    for (std::size_t n = 0; n < d_p.size(); ++n) {
      const Element& e = row.elements[n];
      for (std::int64_t d = 0; d < in_.value_depth; ++d) {
        const double d_o = in_.d_o[size(row.number * in_.value_depth + d)];
        d_p[n] += e.kept * d_o * in_.v[size(e.key * in_.value_depth + d)];
        d_v[size(e.key * in_.value_depth + d)] += e.p * e.kept * d_o;
      }
      delta += e.p * d_p[n];
    }
    if (!in_.sinks.empty() && in_.sinks[size(row.h)] > -std::numeric_limits<double>::infinity()) {
      d_sinks[size(row.h)] -= std::exp(in_.sinks[size(row.h)] - lse[size(row.number)]) * delta;
    }
    for (std::size_t n = 0; n < d_p.size(); ++n) {
      const Element& e = row.elements[n];
      const double g = e.p * (d_p[n] - delta), d_s = g * e.slope * in_.scale;
      if (!in_.bias.empty()) {
        d_bias[bias_at(row, e.j)] += g;
      }
      for (std::int64_t d = 0; d < in_.depth; ++d) {
        d_q[size(row.number * in_.depth + d)] += d_s * in_.k[size(e.key * in_.depth + d)];
        d_k[size(e.key * in_.depth + d)] += d_s * in_.q[size(row.number * in_.depth + d)];
      }
    }
  }

  AttentionInputs in_;
};

}  // namespace fretwork
