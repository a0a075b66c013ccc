// The seed of tests whose inputs are new every run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace fretwork {

/// New every run; printed, so that a failure can be repeated with FRETWORK_TEST_SEED.
inline std::uint64_t fresh_seed() {
  static const std::uint64_t seed = [] {
    const char* const given = std::getenv("FRETWORK_TEST_SEED");
    const std::uint64_t chosen = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::cout << "FRETWORK_TEST_SEED=" << chosen << std::endl;
    return chosen;
  }();
  return seed;
}

}  // namespace fretwork
