// The choice of kernels for dsd and dds against recorded times: on a sample of random products, the kernel that the
// cost model takes is about as fast as the fastest. Needs no GPU: the recording driver stands for an H200.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "fretwork/ops.h"
#include "fretwork/patterns.h"
#include "support/recording_fixture.h"

namespace fretwork {
namespace {

using Json = nlohmann::json;
using Index = std::int64_t;

/// A matrix with as many blocks as were measured, at random places.
std::shared_ptr<const BlockLayout> layout_of(const Json& row, std::mt19937_64& random) {
  const Index block = row.at("block"), rows = Index(row.at("rows")) / block, cols = Index(row.at("cols")) / block;
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(rows * cols));
  std::fill_n(mask.begin(), row.at("blocks").get<Index>(), std::uint8_t{1});
  std::ranges::shuffle(mask, random);
  return BlockLayout::make({1, rows, cols, block, block}, mask);
}

/// The name that the recorded times give to a kernel.
std::string way_of(std::string kernel) {
  std::erase(kernel, ' ');
  const auto numbers = [&](std::size_t from) {
    std::vector<int> list;
    for (std::size_t at = kernel.find(',', from); at != std::string::npos; at = kernel.find(',', at + 1)) {
      list.push_back(std::atoi(kernel.c_str() + at + 1));
    }
    return list;
  };
  if (const std::size_t at = kernel.find("spmm_small<"); at != std::string::npos) {
    const auto n = numbers(at);
    return "small, tiles of " + std::to_string(n[0]) + " × " + std::to_string(n[1]);
  }
  if (const std::size_t at = kernel.find("spmm_wide<"); at != std::string::npos) {
    return "hopper, tiles of " + std::to_string(numbers(at)[0]) + " columns";
  }
  if (kernel.find("spmm_narrow<") != std::string::npos) {
    return "hopper";
  }
  const std::size_t at = kernel.find("::spmm<");
  return at == std::string::npos ? kernel : "portable, tiles of " + std::to_string(numbers(at)[2]) + " columns";
}

class BlockChoice : public RecordedTest {
 protected:
  /// The kernels of a product.
  template <typename Call>
  std::vector<std::string> kernels_of(const Call& call) {
    const std::size_t before = count();
    call();
    std::vector<std::string> names;
    std::ranges::transform(launches(before), std::back_inserter(names), &RecordedLaunch::kernel);
    return names;
  }
};

TEST_F(BlockChoice, OneLongRowTakesNoRoomInAllOthers) {
  constexpr Index kBlocks = 1500, kSize = 16 * kBlocks;
  std::vector<std::uint8_t> mask(kBlocks * kBlocks);
  std::fill_n(mask.begin(), 200, std::uint8_t{1});
  for (Index row = 0; row < kBlocks; ++row) {
    mask[static_cast<std::size_t>(row * (kBlocks + 1))] = 1;
  }
  const auto layout = BlockLayout::make({1, kBlocks, kBlocks, 16, 16}, mask);
  const auto names = kernels_of([&] {
    const TensorView values = tensor(DType::f16, {layout->nnz(), 16, 16}), x = tensor(DType::f16, {kSize, 16});
    dsd(values, x, layout, x, context_, {});
  });
  for (const std::string& name : names) {
    EXPECT_EQ(name.find("spmm_small"), std::string::npos) << name;
  }
}

TEST_F(BlockChoice, IsAboutAsFastAsTheBest) {
  const Json all = Json::parse(std::ifstream(FRETWORK_SOURCE_DIR "/bench/results/h200/block_candidates.json"));
  std::mt19937_64 random(1);
  std::vector<double> losses, leads;
  for (const Json& row : all.at("rows")) {
    const auto layout = layout_of(row, random);
    const Index block = row.at("block"), rows = row.at("rows"), cols = row.at("cols"), n = row.at("n");
    const std::string op = row.at("op");
    const bool dds = op == "dds", transposed = op == "dsd, transposed";
    const Index depth = transposed ? rows : cols, result = transposed ? cols : rows;
    memory_.clear();
    const TensorView values = tensor(DType::f16, {layout->nnz(), block, block});
    MatmulOptions options;
    (dds ? options.trans_b : options.trans_a) = dds || transposed;
    const auto names = kernels_of([&] {
      if (dds) {
        fretwork::dds(tensor(DType::f16, {n, depth}), values, layout, tensor(DType::f16, {n, result}), context_,
                      options);
      } else {
        dsd(values, tensor(DType::f16, {depth, n}), layout, tensor(DType::f16, {result, n}), context_, options);
      }
    });
    const auto product = std::ranges::find_if(names, [](const auto& name) { return name.find("spmm") != name.npos; });
    ASSERT_NE(product, names.end());
    const std::string way = way_of(*product);
    const Json& times = row.at("microseconds");
    double best = 1e9, peer = 1e9;
    for (const auto& [name, microseconds] : times.items()) {
      best = std::min(best, microseconds.get<double>());
    }
    for (const auto& [name, microseconds] : row.at("peers").items()) {
      peer = std::min(peer, microseconds.get<double>());
    }
    if (const auto taken = times.find(way); taken != times.end()) {
      losses.push_back(std::log(taken->get<double>() / best));
      leads.push_back(std::log(peer / taken->get<double>()));
    }
  }
  const auto mean = [](const std::vector<double>& logs) {
    double sum = 0;
    for (const double x : logs) {
      sum += x;
    }
    return std::exp(sum / static_cast<double>(logs.size()));
  };
  const auto behind = std::ranges::count_if(leads, [](double x) { return x < std::log(0.95); });
  std::cout << "slower than the best kernel by " << mean(losses) << ", ahead of the best peer by " << mean(leads)
            << ", " << behind << " of " << leads.size() << " behind it by over 5%, at worst "
            << std::exp(std::ranges::min(leads)) << "\n";
  EXPECT_GT(losses.size(), all.at("rows").size() * 9 / 10) << "were measured";
  EXPECT_LT(mean(losses), 1.03);
  EXPECT_LT(static_cast<double>(behind), 0.05 * static_cast<double>(leads.size()));
}

}  // namespace
}  // namespace fretwork
