// Runs a Kronecker product or a weight gradient on the kernels of chosen families.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "ops/kronecker/config.h"

namespace fretwork::kronecker {

/// The TMA and wgmma kernels.
inline constexpr std::initializer_list<Family> kHopper = {Family::hopper, Family::regroup, Family::dense,
                                                          Family::interleaved};

/// The configs of those families that fit, the cheapest first.
template <typename Any>
std::vector<Config> configs_of(const Any& problem, const Context& context, std::initializer_list<Family> families) {
  auto list = cuda::candidates(problem, machine_of(context));
  std::ranges::stable_sort(list, {}, &Candidate<Config>::microseconds);
  std::vector<Config> configs;
  for (const auto& [config, microseconds] : list) {
    if (std::ranges::find(families, config.family) != families.end()) {
      configs.push_back(config);
    }
  }
  return configs;
}

/// On the cheapest of them; false where none fits.
template <typename Any>
bool run_on(const Any& problem, Context& context, std::initializer_list<Family> families) {
  const std::vector<Config> configs = configs_of(problem, context, families);
  return !configs.empty() && cuda::run(problem, context, configs.front());
}

}  // namespace fretwork::kronecker
