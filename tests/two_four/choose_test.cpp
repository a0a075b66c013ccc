// Which 2:4 kernel runs where, and what the cost model says; no GPU is needed to ask.
#include "ops/two_four/choose.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fretwork::two_four {
namespace {

using Index = std::int64_t;

/// A product of aligned operands in memory that is never read, b along k and c along m as in a linear layer.
Problem linear(Index m, Index k, Index n, DType dtype = DType::bf16) {
  Problem p;
  const auto place = [](std::uintptr_t which) { return reinterpret_cast<void*>(which << 20); };
  p.m = m, p.n = n, p.k = k;
  p.dtype = p.out = dtype;
  p.values = {place(1), k / 2, 1};
  p.words = {place(2), k / group(dtype) / 4, 1};
  p.b = {place(3), 1, k, 0};
  p.c = {place(4), 1, m, 0};
  return p;
}
Problem along_n(Problem p) {
  p.b.row = p.n, p.b.col = 1;
  return p;
}

const KernelFamily* family_of(const Problem& p, const Machine& machine = {}) { return choose(p, machine).family; }

TEST(TwoFourChoose, TheFamilyThatWasFastest) {
  for (const Index n : {1, 8}) {
    EXPECT_EQ(family_of(linear(4096, 4096, n)), &kSmallNRegisters);
  }
  EXPECT_EQ(family_of(linear(2048, 2048, 16)), &kSmallNRegisters);
  EXPECT_EQ(family_of(linear(4096, 4096, 16)), &kSmallNTma);
  EXPECT_EQ(family_of(linear(14336, 4096, 64)), &kSmallNTma);
  EXPECT_EQ(family_of(linear(14336, 14336, 1)), &kSmallNTma);
  EXPECT_EQ(family_of(linear(4000, 4096, 16)), &kSmallNCpAsync);  // no whole tiles
  EXPECT_EQ(family_of(linear(4000, 4096, 33)), &kTmaGemm);
  EXPECT_EQ(family_of(along_n(linear(4096, 4096, 16))), &kTmaGemm);
  EXPECT_EQ(family_of(linear(4096, 4096, 16, DType::i8)), &kSmallNCpAsync);
  EXPECT_EQ(family_of(linear(4096, 4096, 16, DType::f8_e4m3)), &kTmaGemm);
  EXPECT_EQ(family_of(linear(4096, 4096, 4096)), &kTmaGemm);
  EXPECT_EQ(family_of(linear(4096, 4096, 4096, DType::f32)), &kGeneric);
  EXPECT_EQ(family_of(linear(4096, 4096, 4096, DType::f32), {.precision = Precision::tf32}), &kTmaGemm);
  EXPECT_EQ(family_of(linear(4096, 4096, 4096, DType::f32), {.precision = Precision::tf32x3}), &kPortable);
  // 33 µs, 18 of them for two copies.
  EXPECT_GT(candidates(linear(1024, 1024, 64, DType::f32), {.precision = Precision::tf32}).front().microseconds, 25);
}

TEST(TwoFourChoose, OtherGpus) {
  const Machine ampere{.arch = 80, .multiprocessors = 108, .shared_bytes = 163 * 1024, .hopper = false};
  EXPECT_EQ(family_of(linear(4096, 4096, 16), ampere), &kSmallNCpAsync);
  EXPECT_EQ(family_of(along_n(linear(4096, 4096, 16)), ampere), &kSmallNCpAsync);
  EXPECT_EQ(family_of(linear(4096, 4096, 65), ampere), &kPortable);
  EXPECT_EQ(choose(linear(4096, 4096, 16), ampere).split, 1);  // there are no clusters
  const Machine turing{.arch = 75, .multiprocessors = 68, .shared_bytes = 64 * 1024, .hopper = false};
  EXPECT_EQ(family_of(linear(4096, 4096, 16), turing), &kGeneric);
  const Machine ada{.arch = 89, .multiprocessors = 128, .shared_bytes = 99 * 1024, .hopper = false};
  EXPECT_EQ(family_of(linear(4096, 4096, 64), ada), &kPortable);  // no room for two stages
}

/// Large products, whose tiles were measured one by one.
TEST(TwoFourChoose, LargeProducts) {
  const auto chosen = [](Index m, Index k, Index n, bool b_along_k) {
    const Problem p = linear(m, k, n);
    return choose(b_along_k ? p : along_n(p), {}).text();
  };
  const auto width = [](int columns, int split = 1, int pair = 1) {
    return Config{.family = &kTmaGemm, .columns = columns, .split = split, .pair = pair}.text();
  };
  for (const bool b : {true, false}) {
    const std::string large = width(256, 1, b ? 1 : 2);
    EXPECT_EQ(chosen(8192, 8192, 8192, b), large);
    EXPECT_EQ(chosen(4096, 14336, 4096, b), large);
    EXPECT_EQ(chosen(14336, 4096, 4096, b), large);
    EXPECT_EQ(chosen(14336, 4096, 512, b), width(256, 1, 2));
    EXPECT_EQ(chosen(2048, 2048, 2048, b), width(256));
  }
}

/// On recorded layers the configuration that is taken is nearly the fastest, which were all measured.
TEST(TwoFourChoose, IsNearlyTheFastest) {
  std::ifstream file(FRETWORK_SOURCE_DIR "/bench/results/h200/two_four_candidates.json");
  const nlohmann::json rows = nlohmann::json::parse(file).at("rows");
  std::vector<double> losses;
  for (const auto& row : rows) {
    const nlohmann::json& times = row.at("us");
    double least = std::numeric_limits<double>::infinity();
    for (const auto& time : times) {
      least = std::min(least, time.get<double>());
    }
    const auto found = times.find(choose(linear(row.at("m"), row.at("k"), row.at("n")), {}).text());
    constexpr double kNotRecorded = 1.3;  // slower ones are left out
    losses.push_back(found == times.end() ? kNotRecorded : found->get<double>() / least);
  }
  std::ranges::sort(losses);
  ASSERT_GE(losses.size(), 300u);
  double sum = 0;
  for (const double loss : losses) {
    sum += std::log(loss);
  }
  EXPECT_LE(std::exp(sum / static_cast<double>(losses.size())), 1.03);
  EXPECT_LE(losses[losses.size() * 9 / 10], 1.08);
}

/// Costs of bf16 linear layers against the times of bench/results/h200/two_four.json and docs/lab/two_four.md.
TEST(TwoFourChoose, CostsAreMicroseconds) {
  struct Measured {
    const KernelFamily* family;
    Index m, k, n;
    double microseconds;
  };
  const Measured rows[] = {{&kSmallNRegisters, 512, 512, 1, 4.8},    {&kSmallNRegisters, 2048, 2048, 16, 7.9},
                           {&kSmallNRegisters, 4096, 4096, 1, 11.8}, {&kSmallNRegisters, 8192, 8192, 1, 29.6},
                           {&kSmallNTma, 512, 512, 64, 6.5},         {&kSmallNTma, 2048, 2048, 64, 9.2},
                           {&kSmallNTma, 4096, 4096, 16, 12.6},      {&kSmallNTma, 8192, 8192, 64, 31.8},
                           {&kSmallNTma, 14336, 4096, 16, 27.9},     {&kSmallNCpAsync, 512, 512, 16, 6.5},
                           {&kSmallNCpAsync, 2048, 2048, 1, 9.0},    {&kSmallNCpAsync, 4096, 4096, 16, 15.2},
                           {&kSmallNCpAsync, 14336, 4096, 16, 31.6}, {&kTmaGemm, 1024, 1024, 128, 9.2},
                           {&kTmaGemm, 4096, 4096, 128, 17.0},       {&kTmaGemm, 4096, 4096, 4096, 127.4},
                           {&kTmaGemm, 8192, 8192, 8192, 976.6},     {&kTmaGemm, 14336, 4096, 512, 83.7},
                           {&kPortable, 2048, 2048, 128, 35.0},      {&kPortable, 14336, 4096, 128, 63.5},
                           {&kPortable, 8192, 8192, 8192, 2447.3}};
  for (const Measured& row : rows) {
    const std::vector<Candidate> all = candidates(linear(row.m, row.k, row.n), {});
    const auto found = std::ranges::find(all, row.family, [](const Candidate& c) { return c.config.family; });
    ASSERT_TRUE(found != all.end()) << row.family->name;
    EXPECT_NEAR(found->microseconds / row.microseconds, 1.0, 0.25)
        << row.family->name << ' ' << row.m << "×" << row.k << "×" << row.n << ": " << found->microseconds;
  }
}

}  // namespace
}  // namespace fretwork::two_four
