// Chooses the kernel of a 2:4 product on a GPU, and says where a dense product is faster.
#include "ops/two_four/choose.h"

#include <array>
#include <tuple>

#include "core/divide.h"
#include "fretwork/two_four.h"
#include "runtime/cuda_driver.h"

namespace fretwork::two_four {
namespace {

namespace driver = fretwork::cuda;

constexpr const KernelFamily* kFamilies[] = {&kSmallNRegisters, &kSmallNTma, &kSmallNCpAsync,
                                             &kTmaGemm,         &kPortable,  &kGeneric};

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

int Machine::clusters(int size) const {
  constexpr int kCounted[] = {132, 66, 39, 30, 22, 17, 15, 15}, kMultiprocessors = 132;
  return std::max(kCounted[size - 1] * multiprocessors / kMultiprocessors, 1);
}

/// `ctas` share an SM and take turns: two take less than twice as long as one.
double TileCost::microseconds(const Problem& p, const Config& config, const Machine& machine, int ctas) const {
  constexpr double kTwo = 0.64, kMegabyte = 1e6;
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const std::int64_t bytes = static_cast<std::int64_t>(size_of(p.dtype)), side = ceil_div(p.n, config.columns);
  const std::int64_t tiles = ceil_div(p.m, rows) * side * p.batch, resident = machine.clusters(config.split) * ctas;
  const double waves = number(ceil_div(tiles, resident)), steps = number(ceil_div(p.k * bytes, 256 * config.split));
  const bool shared = ctas > 1 && tiles * config.split > machine.multiprocessors;
  const double turns = waves * (shared ? ctas * kTwo : 1.0);
  const double sparse = rows * 144.0, b = number(ceil_div(ceil_div(p.n, side), 8) * 8) * 256 / config.pair;
  const double fetched = number(tiles * config.split) * steps * (sparse + b) / kMegabyte;
  const double scale = cost::kMultiprocessors / machine.multiprocessors;
  return cost::kLaunch + start + turns * (steps * step + tile) +
         (config.split > 1 ? waves * (meet + each * (config.split - 1)) : 0.0) + (waves - 1) * wave +
         (config.pair > 1 ? pair : 0.0) + (memory * sparse_bytes(p) / kMegabyte + l2 * fetched) * scale;
}

namespace {

/// In the order of the families, by which `cheapest` decides between equal costs.
std::vector<Candidate> listed(const Problem& problem, const Machine& machine) {
  std::vector<Candidate> list;
  for (const KernelFamily* family : kFamilies) {
    if (family->fits(problem, machine)) {
      family->list(problem, machine, list);
    }
  }
  return list;
}

}  // namespace

Config choose(const Problem& problem, const Machine& machine) {
  return cheapest<Config>(listed(problem, machine)).config;
}

std::vector<Candidate> candidates(const Problem& problem, const Machine& machine) {
  std::vector<Candidate> found = listed(problem, machine);
  std::ranges::stable_sort(found, {}, &Candidate::microseconds);
  return found;
}

namespace {

std::string text_of(const Problem& p) {
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  return "two_four.matmul, " + number(p.m) + " × " + number(p.k) + " 2:4 by " + number(p.n) + " columns" +
         (p.batch > 1 ? ", batch " + number(p.batch) : "") + ", " + name_of(p.dtype) + " to " + name_of(p.out);
}

std::vector<Explained> explained(const Problem& problem, const Machine& machine) {
  std::vector<Explained> all;
  for (const auto& [config, microseconds] : candidates(problem, machine)) {
    all.push_back({config.text(), microseconds});
  }
  return all;
}

void launch(const Problem& problem, const Config& config, const Machine& machine, Context& context) {
  const auto call = [&] { config.family->launch(problem, config, machine, context); };
  if (explains()) [[unlikely]] {
    const bool over = writes_over({problem.c.data}, {problem.b.data, problem.values.data, problem.words.data});
    const auto named = [&] { return call(), config.text(); };
    return explain(context, text_of(problem), explained(problem, machine), named, over);
  }
  call();
}

/// Everything that a choice looks at. Pointers count by their place in 16 bytes, and by whether they are there.
using Numbers = std::array<std::int64_t, 17>;
Numbers numbers_of(const Problem& p, const Context& context) {
  std::int64_t end = static_cast<std::int64_t>(p.activation) << 8 | static_cast<std::int64_t>(p.out) << 16 |
                     std::int64_t{p.word_bytes} << 24;
  for (const void* const given : {p.bias.data, p.scale_s.data, p.scale_b.data}) {
    end = (end & ~0xff) | (end & 0xff) << 1 | std::int64_t{given != nullptr};
  }
  end |= std::int64_t{p.scale_out != nullptr} << 32;
  return {p.m,
          p.n,
          p.k,
          p.batch,
          p.values.line,
          p.values.along,
          p.words.line,
          p.words.along,
          p.b.row,
          p.b.col,
          p.b.batch,
          p.c.row,
          p.c.col,
          p.c.batch,
          end,
          address_bits({p.values.data, p.words.data, p.b.data, p.c.data}),
          settings_of(p.dtype, context)};
}

const Config& chosen_lately(const Problem& problem, const Machine& machine, const Context& context) {
  thread_local Lately<std::tuple_size_v<Numbers>, Config> lately;
  return lately.get(numbers_of(problem, context), [&] { return choose(problem, machine); });
}

}  // namespace

void cuda::run(const Problem& problem, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  const Machine machine = Machine::of(context);
  launch(problem, chosen_lately(problem, machine, context), machine, context);
}

bool cuda::run(const Problem& problem, const KernelFamily& family, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  const Machine machine = Machine::of(context);
  std::vector<Candidate> list;
  if (family.fits(problem, machine)) {
    family.list(problem, machine, list);
  }
  if (list.empty()) {
    return false;
  }
  launch(problem, cheapest<Config>(list).config, machine, context);
  return true;
}

bool cuda::run(const Problem& problem, const Config& config, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  const Machine machine = Machine::of(context);
  if (!config.family->fits(problem, machine)) {
    return false;
  }
  std::vector<Candidate> list;
  config.family->list(problem, machine, list);
  if (std::ranges::find(list, config, &Candidate::config) == list.end()) {
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
