// Chooses the kernel of a 2:4 product on a GPU, and says where a dense product is faster.
#include "ops/two_four/choose.h"

#include <cmath>

#include "fretwork/two_four.h"
#include "runtime/cuda_driver.h"

namespace fretwork::two_four {
namespace {

namespace driver = fretwork::cuda;

constexpr const KernelFamily* kFamilies[] = {&kSmallNRegisters, &kSmallNTma, &kSmallNCpAsync,
                                             &kTmaGemm,         &kPortable,  &kGeneric};

/// The family that a call takes: the first that fits, in the order of their speed. Later ones are not priced, because
/// counting their clusters would compile their kernels.
/// With up to 64 columns the kernels for them win wherever they fit: 4096² bf16 with 16 columns takes 12.6 µs on
/// small_n_tma and 15.2 on small_n_cp_async, 2048² 7.6 on small_n_registers and 8.3 on small_n_tma.
/// small_n_cp_async loses to tma_gemm with more than 32 columns (4096² with 64: 21.0 and 17.5 µs), and where b does not
/// lie along k, which it gathers through registers in 1.5 to 3 times as long.
const KernelFamily& choose_family(const Problem& p, const Machine& machine) {
  constexpr std::int64_t kFewColumns = 32;
  const bool few = p.n * p.batch <= kFewColumns && p.b.row == 1;
  const KernelFamily* const order[] = {
      &kSmallNRegisters, &kSmallNTma, few ? &kSmallNCpAsync : &kTmaGemm, few ? &kTmaGemm : &kSmallNCpAsync,
      &kPortable,        &kGeneric};
  return **std::ranges::find_if(order, [&](const KernelFamily* family) { return family->fits(p, machine); });
}

}  // namespace

bool has_fp8_mma_sp(const std::string& arch) {
  const int number = driver::arch_number(arch);
  return number == 89 || number >= 120;
}

Machine Machine::of(const Context& context) {
  const driver::DeviceInfo& info = driver::device_info(context.device.index);
  const std::string arch = driver::kernel_arch(context.device.index);
  return {info.arch,        info.multiprocessors, info.shared_per_block,
          arch == "sm_90a", has_fp8_mma_sp(arch), context.precision};
}

std::string Config::text() const {
  std::string text = family != nullptr ? family->name : "none";
  const auto add = [&](const char* name, int value, int usual) {
    if (value != usual) {
      text += std::string(", ") + name + " " + std::to_string(value);
    }
  };
  add("rows", rows, 0);
  add("columns", columns, 0);
  add("split", split, 1);
  add("pair", pair, 1);
  add("warps", warps, 0);
  add("stages", stages, 0);
  return text;
}

/// Costs are lower bounds until the clusters that run at once were counted, which takes a compiled kernel: only the
/// cheapest are counted.
Config choose(const KernelFamily& family, const Problem& problem, const Machine& machine, const CountClusters& count) {
  Candidates list;
  family.list(problem, machine, list);
  std::array<bool, Candidates::kMost> counted{};
  while (true) {
    const std::span<Candidate> all = list.all();
    Candidate& best = cheapest<Config>(all);
    bool& known = counted[static_cast<std::size_t>(&best - all.data())];
    if (known || best.config.split == 1 || family.cost == nullptr) {
      return best.config;
    }
    best.microseconds = family.cost(problem, best.config, machine, count(best.config));
    known = true;
  }
}

Config choose(const Problem& problem, const Machine& machine, const CountClusters& count) {
  return choose(choose_family(problem, machine), problem, machine, count);
}

std::vector<Candidate> candidates(const Problem& problem, const Machine& machine) {
  std::vector<Candidate> found;
  for (const KernelFamily* family : kFamilies) {
    if (family->fits(problem, machine)) {
      Candidates list;
      family->list(problem, machine, list);
      found.insert(found.end(), list.all().begin(), list.all().end());
    }
  }
  std::ranges::stable_sort(found, {}, &Candidate::microseconds);
  return found;
}

namespace {

std::string text_of(const Problem& p) {
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  return "two_four.matmul, " + number(p.m) + " × " + number(p.k) + " 2:4 by " + number(p.n) + " columns" +
         (p.batch > 1 ? ", batch " + number(p.batch) : "") + ", " + name_of(p.dtype) + " to " + name_of(p.out);
}

/// The configurations of the family that is taken, without those whose clusters do not all run at once, and the
/// cheapest of every other family that fits. Costs are lower bounds where they are above that of the one taken.
std::vector<Explained> explained(const Problem& problem, const Config& taken, const Machine& machine, int device) {
  std::vector<Explained> all;
  for (const KernelFamily* family : kFamilies) {
    if (!family->fits(problem, machine)) {
      continue;
    }
    Candidates list;
    family->list(problem, machine, list);
    if (family != taken.family) {
      const Candidate& best = cheapest<Config>(list.all());
      all.push_back({best.config.text(), best.microseconds});
      continue;
    }
    const auto counted = [&](const Candidate& one) {
      return one.config.split > 1 && family->cost != nullptr
                 ? family->cost(problem, one.config, machine, family->clusters(problem, one.config, device))
                 : one.microseconds;
    };
    const double most = counted(*std::ranges::find(list.all(), taken, &Candidate::config));
    for (const Candidate& one : list.all()) {
      const double cost = one.microseconds <= most ? counted(one) : one.microseconds;  // choose() did not count others
      if (std::isfinite(cost)) {
        all.push_back({one.config.text(), cost});
      }
    }
  }
  return all;
}

void launch(const Problem& problem, const Config& config, const Machine& machine, Context& context) {
  const auto call = [&] { config.family->launch(problem, config, machine, context); };
  if (explains()) [[unlikely]] {
    const bool over = writes_over({problem.c.data}, {problem.b.data, problem.values.data, problem.words.data});
    const auto named = [&] { return call(), config.text(); };
    return explain(context, text_of(problem), explained(problem, config, machine, context.device.index), named, over);
  }
  call();
}

void launch_cheapest(const KernelFamily& family, const Problem& problem, const Machine& machine, Context& context) {
  const auto count = [&](const Config& config) { return family.clusters(problem, config, context.device.index); };
  launch(problem, choose(family, problem, machine, std::cref(count)), machine, context);
}

}  // namespace

void cuda::run(const Problem& problem, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  const Machine machine = Machine::of(context);
  launch_cheapest(choose_family(problem, machine), problem, machine, context);
}

bool cuda::run(const Problem& problem, const KernelFamily& family, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  const Machine machine = Machine::of(context);
  if (!family.fits(problem, machine)) {
    return false;
  }
  launch_cheapest(family, problem, machine, context);
  return true;
}

bool cuda::run(const Problem& problem, const Config& config, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  const Machine machine = Machine::of(context);
  if (!config.family->fits(problem, machine)) {
    return false;
  }
  Candidates list;
  config.family->list(problem, machine, list);
  if (std::ranges::find(list.all(), config, &Candidate::config) == list.all().end()) {
    return false;
  }
  launch(problem, config, machine, context);
  return true;
}

bool dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, Precision precision, bool behind) {
  if (dtype == DType::f32) {
    // Exact fp32 has no sparse unit, and rounding to tf32 first takes longer than all but large products.
    return precision == Precision::ieee || behind || double(m) * double(n) * double(k) < double(1ll << 34);
  }
  // Few columns wait for the weight, of which half is not read; with more, mma.sp is slower than a dense wgmma. Large
  // weights take long to expand, and those whose lines begin anywhere longer than anything else.
  const bool in_units = k / 2 * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
  return behind && in_units && n > 64 && (n > 256 || m * k < 1 << 25);
}

bool dense_wins(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, Device device, Precision precision) {
  if (device.type == DeviceType::cpu || m == 0 || n == 0 || k == 0) {
    return false;  // measured from 1 to 2048 columns, on a CPU with AVX-512 and without AMX
  }
  const bool behind = driver::available() && device.index < driver::device_count() &&
                      driver::device_info(device.index).arch >= 90 && driver::kernel_arch(device.index) != "sm_90a";
  return dense_wins(m, n, k, dtype, precision, behind);
}

}  // namespace fretwork::two_four
