// FRETWORK_EXPLAIN over the recording driver: every op that chooses by cost says what it could take, and what it took.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "fretwork/ops.h"
#include "fretwork/patterns.h"
#include "fretwork/two_four.h"
#include "runtime/choose.h"
#include "support/recording_fixture.h"

namespace fretwork {
namespace {

using Index = std::int64_t;

/// What a call has printed.
struct Explanation {
  std::string problem, time;
  std::vector<std::string> candidates;
  std::vector<double> microseconds;
  std::vector<std::string> taken;

  std::string first_taken() const { return taken.empty() ? "nothing" : taken.front(); }
};

/// One call's text; nothing where it is not of the form.
std::optional<Explanation> parse(const std::string& text) {
  std::istringstream lines(text);
  Explanation found;
  const std::string begin = "fretwork: ", expected = ": expected ", unit = " µs", taken = ", taken";
  if (!std::getline(lines, found.problem) || !found.problem.starts_with(begin)) {
    return std::nullopt;
  }
  found.problem = found.problem.substr(begin.size());
  for (std::string line; std::getline(lines, line);) {
    if (!found.time.empty() || !line.starts_with("  ")) {
      return std::nullopt;
    }
    const std::size_t at = line.rfind(expected);
    if (at == line.npos) {
      found.time = line.substr(2);
      continue;
    }
    found.candidates.push_back(line.substr(2, at - 2));
    char* end = nullptr;
    found.microseconds.push_back(std::strtod(line.c_str() + at + expected.size(), &end));
    const std::string rest = end;
    if (rest == unit + taken) {
      found.taken.push_back(found.candidates.back());
    } else if (rest != unit) {
      return std::nullopt;
    }
  }
  return found;
}

class Explain : public RecordedTest {
 protected:
  void TearDown() override { explain_calls(false); }
  static std::string printed(const std::function<void()>& call) {
    testing::internal::CaptureStderr();
    call();
    return testing::internal::GetCapturedStderr();
  }
  /// Launches of the call when it explains nothing, and then its explanation, which is checked.
  Explanation explain(const std::function<void()>& call, std::size_t calls = 11) {
    explain_calls(false);
    const std::size_t first = count();
    EXPECT_EQ(printed(call), "");
    const std::size_t quiet = count() - first;
    explain_calls(true);
    const std::string text = printed(call);
    explain_calls(false);
    EXPECT_EQ(count() - first - quiet, calls * quiet) << text;
    const auto found = parse(text);
    EXPECT_TRUE(found) << text;
    if (!found) {
      return {};
    }
    EXPECT_FALSE(found->candidates.empty());
    EXPECT_TRUE(std::ranges::is_sorted(found->microseconds)) << text;
    EXPECT_TRUE(std::ranges::all_of(found->microseconds, [](double us) { return us > 4 && us < 1e9; })) << text;
    EXPECT_EQ(found->taken.size(), 1u) << text;
    return *found;
  }

  const RecordCapture capture_ = find<RecordCapture>("record_capture");
};

constexpr const char* kTime = "took 100.0 µs";  // a tenth of the recording driver's millisecond

TEST_F(Explain, Attention) {
  const auto passes = [&](Index heads, Index kv_heads, Index queries, Index keys, bool backward) {
    const PatternPtr pattern = patterns::full({queries, keys});
    const TensorView q = tensor(DType::bf16, {1, heads, queries, 128}),
                     k = tensor(DType::bf16, {1, kv_heads, keys, 128}),
                     out = tensor(DType::bf16, {1, heads, queries, 128}), lse = tensor(DType::f32, {1, heads, queries}),
                     d_q = tensor(DType::bf16, {1, heads, queries, 128}),
                     d_k = tensor(DType::bf16, {1, kv_heads, keys, 128}),
                     d_v = tensor(DType::bf16, {1, kv_heads, keys, 128});
    const Explanation found = explain([&] {
      backward ? attention_backward(q, k, k, pattern, out, lse, out, {}, {d_q, d_k, d_v}, context_)
               : attention(q, k, k, pattern, out, lse, context_);
    });
    EXPECT_EQ(found.time, kTime);
    EXPECT_EQ(found.taken, std::vector{found.candidates.front()});
    return found;
  };
  const Explanation forward = passes(16, 16, 4096, 4096, false);
  EXPECT_EQ(
      forward.problem,
      "attention, batch 1, 16 heads (16 of keys), 4096 queries × 4096 keys, 100% of scores, head dim 128, bfloat16");
  EXPECT_EQ(forward.candidates, (std::vector<std::string>{"hopper", "portable"}));
  EXPECT_EQ(passes(64, 8, 1, 65536, false).first_taken(), "decode");
  EXPECT_EQ(passes(64, 8, 4, 4096, false).first_taken(), "hopper, several heads in a tile");
  const Explanation backward = passes(15, 15, 1024, 1024, true);
  EXPECT_TRUE(backward.problem.starts_with("attention_backward, batch 1, 15 heads"));
  EXPECT_EQ(backward.candidates, (std::vector<std::string>{"hopper, five products", "hopper", "portable"}));
}

TEST_F(Explain, BlockProducts) {
  const auto blocks = random_blocks({1, 32, 16, 32, 32}, 0.1, 0);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const TensorView values = tensor(dtype, {1, blocks->nnz(), 32, 32}), tall = tensor(dtype, {1, 1, 1024, 256}),
                     wide = tensor(dtype, {1, 1, 512, 256}), rows = tensor(dtype, {1, 1, 256, 1024}),
                     out = tensor(dtype, {1, 1, 256, 512});
    const Explanation found[] = {explain([&] {
                                   sdd(tall, wide, blocks, values, context_, {false, true});
                                 }),
                                 explain([&] { dsd(values, wide, blocks, tall, context_); }),
                                 explain([&] { dds(rows, values, blocks, out, context_); })};
    const char* const names[] = {"sdd", "dsd", "dds"};
    for (int n = 0; n < 3; ++n) {
      EXPECT_TRUE(found[n].problem.starts_with(std::string(names[n]) + ", 1024 × 512 in ")) << found[n].problem;
      EXPECT_TRUE(found[n].problem.ends_with(name_of(dtype))) << found[n].problem;
      // 256 columns are few: a product with them takes small tiles.
      const char* const family = dtype == DType::f32 ? "generic" : n == 0 ? "hopper" : "small, ";
      EXPECT_TRUE(found[n].first_taken().starts_with(family)) << found[n].first_taken();
      EXPECT_EQ(found[n].time, kTime);
    }
  }
}

TEST_F(Explain, TwoFour) {
  const auto linear = [&](Index m, Index k, Index n) {
    const TensorView x = tensor(DType::bf16, {n, k}), y = tensor(DType::bf16, {n, m});
    const TwoFour weight{tensor(DType::bf16, {m, k / 2}),
                         tensor(DType::i16, {m, two_four::words(k, DType::bf16, DType::i16)}), 1};
    const Explanation found = explain([&] { two_four::linear(x, weight, y, context_); });
    EXPECT_TRUE(found.problem.starts_with("two_four.matmul, " + std::to_string(m) + " × " + std::to_string(k) +
                                          " 2:4 by " + std::to_string(n) + " columns"))
        << found.problem;
    EXPECT_EQ(found.time, kTime);
    // Every family that fits is there.
    EXPECT_TRUE(std::ranges::find(found.candidates, "generic") != found.candidates.end());
    return found.first_taken();
  };
  EXPECT_TRUE(linear(2048, 2048, 1).starts_with("small_n_registers"));
  EXPECT_TRUE(linear(4096, 4096, 16).starts_with("small_n_tma"));
  EXPECT_TRUE(linear(4000, 4096, 16).starts_with("small_n_cp_async"));
  EXPECT_TRUE(linear(4096, 4096, 4096).starts_with("tma_gemm"));
}

TEST_F(Explain, Kronecker) {
  const TensorView x = tensor(DType::f16, {2048, 6 * 48}), y = tensor(DType::f16, {2048, 6 * 64}),
                   w = tensor(DType::f16, {6, 64, 48, 1}), d_w = tensor(DType::f16, {6, 64, 48, 1});
  const Explanation product = explain([&] { ksmm(x, w, y, context_); });
  EXPECT_TRUE(product.problem.starts_with("ksmm")) << product.problem;
  EXPECT_EQ(product.taken, std::vector{product.candidates.front()});
  const Explanation gradient = explain([&] { ksmm_backward_weight(x, y, d_w, {}, context_); });
  EXPECT_TRUE(gradient.problem.starts_with("ksmm_backward_weight")) << gradient.problem;
  EXPECT_EQ(gradient.time, kTime);
}

/// What a second call would read, the first one has written.
TEST_F(Explain, OnceWhereAResultReplacesAnOperand) {
  const TensorView q = tensor(DType::bf16, {1, 4, 256, 64}), k = tensor(DType::bf16, {1, 4, 256, 64}),
                   lse = tensor(DType::f32, {1, 4, 256});
  const PatternPtr pattern = patterns::full({256, 256});
  EXPECT_EQ(explain([&] { attention(q, k, k, pattern, q, lse, context_); }, 1).time,
            "took 1000.0 µs, called once: compiling and launching may be part of it");
  const auto blocks = random_blocks({1, 8, 8, 32, 32}, 0.5, 0);
  const TensorView values = tensor(DType::bf16, {1, blocks->nnz(), 32, 32}), x = tensor(DType::bf16, {1, 1, 256, 256});
  EXPECT_NE(explain([&] { dsd(values, x, blocks, x, context_); }, 1).time, kTime);
}

TEST_F(Explain, OnceInACapture) {
  const auto blocks = random_blocks({1, 8, 8, 32, 32}, 0.5, 0);
  const TensorView values = tensor(DType::bf16, {1, blocks->nnz(), 32, 32}), x = tensor(DType::bf16, {1, 1, 256, 256}),
                   y = tensor(DType::bf16, {1, 1, 256, 256});
  int stream = 0;
  context_.stream = &stream;  // the default stream cannot be captured
  capture_(true);
  const Explanation found = explain([&] { dsd(values, x, blocks, y, context_); }, 1);
  capture_(false);
  EXPECT_EQ(found.time, "captured into a graph, not timed");
}

}  // namespace
}  // namespace fretwork
