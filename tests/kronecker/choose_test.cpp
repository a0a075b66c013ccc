// The choice of kernels against recorded times: on a sample of random problems, the kernel that the cost model takes is
// about as fast as the fastest. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ops/kronecker/config.h"

namespace fretwork::kronecker {
namespace {

using Json = nlohmann::json;

alignas(1024) std::byte nothing[1];

const Json& rows() {
  static const Json all =
      Json::parse(std::ifstream(FRETWORK_SOURCE_DIR "/bench/results/h200/kronecker_candidates.json")).at("rows");
  return all;
}

Sizes sizes_of(const Json& row) {
  const auto& p = row.at("pattern");
  return {p[0], p[1], p[2], p[3]};
}

Matrix matrix(std::int64_t batch, std::int64_t features, bool last) {
  return {nothing, last ? 1 : features, last ? batch : 1};
}

Machine h200(const Json& row) {
  return typical_machine("sm_90a", row.at("precision") == "tf32" ? Precision::tf32 : Precision::ieee);
}

Problem product(const Json& row) {
  const Sizes s = sizes_of(row);
  Problem p;
  p.sizes = s;
  p.batch = row.at("batch");
  p.dtype = row.at("dtype") == "float16" ? DType::f16 : DType::f32;
  p.last = row.at("bs_last");
  p.x = matrix(p.batch, s.a * s.c * s.d, p.last);
  p.y = matrix(p.batch, s.a * s.b * s.d, p.last);
  p.w = {nothing, s.b * s.c * s.d, s.c * s.d, s.d, 1};
  return p;
}

WeightProblem gradient(const Json& row) {
  const Sizes s = sizes_of(row);
  WeightProblem p;
  p.sizes = s;
  p.batch = row.at("batch");
  p.dtype = row.at("dtype") == "float16" ? DType::f16 : DType::f32;
  const bool last = row.at("bs_last");
  p.x = matrix(p.batch, s.a * s.c * s.d, last);
  p.d_y = matrix(p.batch, s.a * s.b * s.d, last);
  p.d_w = {nothing, s.b * s.c * s.d, s.c * s.d, s.d, 1};
  return p;
}

/// "interleaved:64" was measured as "interleaved", with a width of its own choice.
const Json* time_of(const Json& row, const Config& config, bool gradient) {
  const Json& times = row.at("us");
  const std::string text = text_of(config), family = text.substr(0, text.find(':'));
  const bool plain = gradient || !times.contains(text);
  const auto found = times.find(plain ? family : text);
  return found == times.end() ? nullptr : &*found;
}

/// Time of the choice ÷ least time, of each row whose choice was measured, sorted.
std::vector<double> losses(const std::string& op, const std::string& dtype, const std::string& precision) {
  std::vector<double> all;
  for (const Json& row : rows()) {
    if (row.at("op") != op || row.at("dtype") != dtype || row.at("precision") != precision) {
      continue;
    }
    const bool is_product = op == "ksmm";
    const auto candidates =
        is_product ? cuda::candidates(product(row), h200(row)) : cuda::candidates(gradient(row), h200(row));
    const Config config = cheapest<Config>(candidates).config;
    double least = 1e9;
    for (const auto& time : row.at("us")) {
      least = std::min(least, time.get<double>());
    }
    if (const Json* const time = time_of(row, config, !is_product)) {
      all.push_back(time->get<double>() / least);
    }
  }
  std::ranges::sort(all);
  EXPECT_GE(all.size(), 200u);
  return all;
}

double mean(const std::vector<double>& all) {
  double sum = 0;
  for (const double one : all) {
    sum += std::log(one);
  }
  return std::exp(sum / double(all.size()));
}

void expect_good(const std::string& op, const std::string& dtype, const std::string& precision, double most_mean,
                 double most_of_nine_in_ten) {
  const std::vector<double> all = losses(op, dtype, precision);
  EXPECT_LE(mean(all), most_mean);
  EXPECT_LE(all[all.size() * 9 / 10], most_of_nine_in_ten);
}

TEST(KroneckerChoice, IsNearlyTheFastest) {
  expect_good("ksmm", "float16", "ieee", 1.05, 1.12);
  expect_good("ksmm", "float32", "tf32", 1.02, 1.08);
  expect_good("ksmm", "float32", "ieee", 1.02, 1.05);
  expect_good("ksmm_backward_weight", "float16", "ieee", 1.04, 1.17);
  expect_good("ksmm_backward_weight", "float32", "tf32", 1.04, 1.15);
}

}  // namespace
}  // namespace fretwork::kronecker
