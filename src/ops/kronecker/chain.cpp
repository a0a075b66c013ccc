// Plans a chain of factors (which neighbours run as one kernel), and describes the plan in words.
#include "ops/kronecker/chain.h"

#include <algorithm>
#include <charconv>

#include "fretwork/error.h"
#include "ops/kronecker/config.h"
#include "ops/kronecker/cuda/families.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker {
namespace chain {
namespace {

bool half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

/// The kernel that one factor runs on, with contiguous operands and `batch` rows, or many.
std::string kernel_of(const Sizes& s, const Target& target) {
  constexpr std::int64_t kMany = 4096;
  alignas(256) static std::byte nothing[1];  // is only looked at for its alignment
  if (target.arch == "cpu") {
    return "cpu";
  }
  if (target.dtype == DType::f32) {
    return "fp32";  // by the precision: on FFMA, or on the tensor cores
  }
  Problem problem;
  problem.sizes = s;
  problem.batch = target.batch > 0 ? target.batch : kMany;
  problem.dtype = target.dtype;
  problem.last = target.last;
  problem.x = {nothing, target.last ? 1 : s.a * s.c * s.d, target.last ? problem.batch : 1};
  problem.y = {nothing, target.last ? 1 : s.a * s.b * s.d, target.last ? problem.batch : 1};
  problem.w = {nothing, s.b * s.c * s.d, s.c * s.d, s.d, 1};
  const auto candidates = kronecker::cuda::candidates(problem, typical_machine(target.arch));
  return std::string(columns_of(cheapest<Config>(candidates).config).kernel);
}

/// The number from `from` on, which a letter may follow; −1 where there is none.
int number_at(const std::string& text, std::size_t from) {
  int number = -1;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + std::min(from, text.size()), end, number);
  const bool whole = rest == end || (rest + 1 == end && *rest >= 'a' && *rest <= 'z');
  return error == std::errc() && whole ? number : -1;
}

/// "cuda:1" as the architecture that this GPU's kernels are chosen by.
std::string named_arch(const std::string& arch) {
  if (arch.starts_with("cuda:") && number_at(arch, 5) >= 0) {
    return fretwork::cuda::kernel_arch(number_at(arch, 5));
  }
  if (arch.starts_with("sm_") && number_at(arch, 3) >= 0 && number_at(arch, 3) < kLeastArch) {
    throw Error("plan", "arch", "sm_75 or later, as NVRTC 13 compiles for no older GPU", arch);
  }
  if (arch != "cpu" && !(arch.starts_with("sm_") && number_at(arch, 3) >= 0)) {
    throw Error("plan", "arch", "cpu, a GPU such as cuda:0, or an architecture such as sm_90a", arch);
  }
  return arch;
}

void check(std::span<const Sizes> patterns) {
  std::ranges::for_each(patterns, KroneckerPattern::make);
  for (std::size_t n = 1; n < patterns.size(); ++n) {
    const Sizes &before = patterns[n - 1], &s = patterns[n];
    if (before.a * before.b * before.d != s.a * s.c * s.d) {
      throw Error("plan", "patterns[" + std::to_string(n) + "]",
                  std::to_string(before.a * before.b * before.d) + " in features (a·c·d), as come before it",
                  std::to_string(s.a * s.c * s.d));
    }
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
  const bool many = target.batch == 0 || target.batch > few::kMostRows;
  const bool fused = target.arch == "sm_90a" && half(target.dtype) && !target.last && many;
  std::vector<Step> steps;
  for (std::size_t n = 0; n < factors.size(); n += steps.back().count) {
    const bool two = fused && n + 1 < factors.size() && fuse(factors[n], factors[n + 1]);
    steps.push_back({n, two ? 2u : 1u});
  }
  return steps;
}

}  // namespace chain

std::vector<std::string> plan(std::span<const KroneckerPattern::Sizes> patterns, const std::string& arch, DType dtype,
                              bool last, std::int64_t batch) {
  using namespace chain;
  check(patterns);
  if (!is_floating(dtype)) {
    throw Error("plan", "dtype", "float64, float32, float16 or bfloat16", name_of(dtype));
  }
  if (batch < 0) {
    throw Error("plan", "batch", "at least 0", std::to_string(batch));
  }
  const Target target{named_arch(arch), dtype, last, batch};
  std::vector<std::string> lines;
  for (const Step& step : chain::plan(patterns, target)) {
    const std::string first = std::to_string(step.first);
    if (step.count == 1) {
      lines.push_back(first + ": " + kernel_of(patterns[step.first], target));
      continue;
    }
    const Monarch m = *fuse(patterns[step.first], patterns[step.first + 1]);
    const std::string cluster = m.ranks > 1 ? ", clusters of " + std::to_string(m.ranks) : "";
    lines.push_back(first + "+" + std::to_string(step.first + 1) + ": fused" + cluster + ", " +
                    std::to_string(Monarch::kRows) + " rows");
  }
  return lines;
}

}  // namespace fretwork::kronecker
