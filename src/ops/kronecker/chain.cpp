// The planner of chains, and how it says what it plans.
#include "ops/kronecker/chain.h"

#include "fretwork/error.h"

namespace fretwork {
namespace kronecker::chain {
namespace {

bool half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

/// Which kernel runs one factor, for words only: backends look at strides and sizes as well.
const char* way(const Sizes& s, const Target& target) {
  if (target.arch == "cpu") {
    return "cpu";
  }
  if (target.arch == "sm_90a" && half(target.dtype) && (target.last || s.d == 1) && s.b + s.c >= 32) {
    return "hopper";
  }
  return !target.last && s.d % 2 == 0 && target.dtype != DType::f64 ? "strided" : "portable";
}

void check(const Target& target) {
  const std::string& arch = target.arch;
  const bool sm = arch.size() > 4 && arch.starts_with("sm_") && arch[3] >= '0' && arch[3] <= '9';
  if (arch != "cpu" && !sm) {
    throw Error("ksmm_chain", "arch", "cpu or an architecture such as sm_90a", arch);
  }
}

}  // namespace

std::optional<Monarch> fuse(const Sizes& first, const Sizes& second) {
  constexpr std::int64_t kMost = 1 << 12;
  const bool monarch = first.d == 1 && second.a == 1 && second.c == first.a && second.d == first.b;
  if (!monarch || std::max({first.a, first.b, first.c, second.b}) > kMost) {
    return std::nullopt;
  }
  const auto n = [](std::int64_t size) { return static_cast<int>(size); };
  for (const int ranks : {1, 2, 4, 8}) {
    const Monarch m{n(first.a), n(first.c), n(first.b), n(second.b), ranks, 1};
    if (m.valid()) {
      return m;
    }
  }
  return std::nullopt;
}

std::vector<Step> plan(std::span<const Sizes> factors, const Target& target) {
  check(target);
  const bool fused = target.arch == "sm_90a" && half(target.dtype) && !target.last;
  std::vector<Step> steps;
  for (std::size_t n = 0; n < factors.size(); n += steps.back().count) {
    const bool two = fused && n + 1 < factors.size() && fuse(factors[n], factors[n + 1]);
    steps.push_back({n, two ? 2u : 1u});
  }
  return steps;
}

}  // namespace kronecker::chain

std::vector<std::string> ksmm_chain_plan(std::span<const KroneckerPattern::Sizes> patterns, const std::string& arch,
                                         DType dtype, bool last) {
  using namespace kronecker::chain;
  const Target target{arch, dtype, last};
  std::vector<std::string> lines;
  for (const Step& step : plan(patterns, target)) {
    const std::string first = std::to_string(step.first);
    if (step.count == 1) {
      lines.push_back(first + ": " + way(patterns[step.first], target));
      continue;
    }
    const Monarch m = *fuse(patterns[step.first], patterns[step.first + 1]);
    const std::string cluster = m.ranks > 1 ? ", clusters of " + std::to_string(m.ranks) : "";
    lines.push_back(first + "+" + std::to_string(step.first + 1) + ": fused" + cluster + ", " +
                    std::to_string(Monarch::kRows) + " rows");
  }
  return lines;
}

}  // namespace fretwork
