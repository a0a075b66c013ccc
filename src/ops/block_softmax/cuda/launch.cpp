// Softmax and its gradient on a GPU: choose, fill parameters, get the kernel, launch.
#include <algorithm>
#include <bit>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/block_softmax/cuda/params.h"
#include "ops/block_softmax/problem.h"
#include "pattern/checks.h"
#include "runtime/alignment.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"

namespace fretwork::block_softmax_op::cuda {
namespace {

using fretwork::cuda::DeviceBuffer;

constexpr const char* kSource = "ops/block_softmax/cuda/kernel.cuh";
constexpr int kVector = 16;  // bytes of one access

/// The layout on the device: lines with blocks, longest first, and the block column of each block.
struct Plan {
  DeviceBuffer lines, columns;
  std::int64_t line_count = 0;
  int length = 0;  ///< blocks of a line that threads are chosen for
  std::size_t bytes() const { return lines.bytes() + columns.bytes(); }
};

/// The packed block of each place, for rpe's gradient.
struct RpePlan {
  DeviceBuffer block_at;
  std::size_t bytes() const { return block_at.bytes(); }
};

template <typename T>
DeviceBuffer upload(const std::vector<T>& host, int device) {
  return host.empty() ? DeviceBuffer() : DeviceBuffer(device, host.data(), host.size() * sizeof(T));
}

/// The length that threads are chosen for: a sixteenth of the blocks may be in longer lines, as a few long ones must
/// not make threads idle in all others; but no line shall be more than 8 times as long, as it would end long after the
/// rest.
int usual_length(const std::vector<SoftmaxLine>& longest_first, std::int64_t blocks) {
  std::int64_t longer = 0;
  for (const SoftmaxLine& line : longest_first) {
    longer += line.count;
    if (longer > blocks / 16) {
      return std::max(line.count, (longest_first.front().count + 7) / 8);
    }
  }
  return 0;
}

Plan make_plan(const BlockLayout& layout, int device) {
  if (layout.nnz() > std::numeric_limits<int>::max()) {
    throw Error("block_softmax", "layout", "fewer than 2^31 blocks", std::to_string(layout.nnz()));
  }
  const auto& s = layout.sizes();
  std::vector<SoftmaxLine> lines;
  std::vector<int> columns;
  for (std::int64_t l = 0; l < s.heads * s.rows; ++l) {
    const auto blocks = layout.by_row().line(l);
    if (!blocks.empty()) {
      lines.push_back({static_cast<int>(columns.size()), static_cast<int>(blocks.size()), static_cast<int>(l / s.rows),
                       static_cast<int>(l % s.rows)});
    }
    for (const auto& entry : blocks) {
      columns.push_back(static_cast<int>(entry.other));
    }
  }
  std::stable_sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.count > b.count; });
  return {upload(lines, device), upload(columns, device), static_cast<std::int64_t>(lines.size()),
          usual_length(lines, layout.nnz())};
}

RpePlan make_rpe_plan(const BlockLayout& layout, int device) { return {upload(block_grid(layout), device)}; }

template <typename P>
std::shared_ptr<const P> plan_for(const BlockLayout& layout, Context& context, P (*make)(const BlockLayout&, int)) {
  return find_device_plan<P>(layout.key(), context, [&](int device) { return make(layout, device); });
}

/// How a kernel is instantiated and launched: what a thread keeps in registers, and how many share a row.
struct Config {
  DType dtype;
  int run;          ///< elements a lane takes at once
  int block_lanes;  ///< lanes on a block's row
  int kept;         ///< runs a thread keeps
  int lanes;        ///< of a warp, on one row
  int warps;        ///< on one row
  int most_threads;

  int threads() const { return 32 * std::max(4, warps); }
  std::int64_t grid(const SoftmaxTasks& tasks) const {
    const int at_once = threads() / 32 / warps;
    return (static_cast<std::int64_t>(tasks.count) + at_once - 1) / at_once;
  }
  std::string text() const {
    std::string text = device_type(dtype);
    for (const int argument : {run, block_lanes, kept, lanes, most_threads}) {
      text += ", " + std::to_string(argument);
    }
    return text;
  }
};

int power_of_two_from(std::int64_t n) { return static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(n))); }

constexpr int kPiece = 128;  // bytes of neighbouring rows that a warp reads from a block at least, if it can
constexpr int kFewThreads = 128, kMostThreads = 512;  // of a CTA; the latter also on a row

/// Which family of kernels, beside the type; `aligned`: everything can be read in runs of 16 bytes of values.
struct Family {
  bool backward;
  SoftmaxExtras extras;
  bool aligned;
};

/// How many runs a thread may keep without crowding others out of the register file, in rising order: few, as each is a
/// kernel. Sums with extras need a register for each element, all else stays packed as it came.
std::span<const int> kept_choices(DType dtype, const Family& family) {
  static constexpr int kForward[] = {4, 8, 12}, kNarrow[] = {4, 8, 10, 12}, kBackward[] = {4, 6, 8}, kSums[] = {4, 8},
                       kMixed[] = {2};
  if (!family.aligned) {
    return std::span(kSums).first(family.extras == SoftmaxExtras::none ? 2 : 1).last(1);
  }
  if (family.backward) {
    return kBackward;
  }
  return family.extras == SoftmaxExtras::none
             ? (size_of(dtype) == 2 ? std::span<const int>(kNarrow) : std::span<const int>(kForward))
         : family.extras == SoftmaxExtras::same ? std::span(kSums).first(size_of(dtype) == 2 ? 1 : 2)
                                                : std::span<const int>(kMixed);
}

/// As few threads on a row as keep it in registers, since what a thread does besides its entries costs as much as some
/// twenty of them. Rare families have a single shape of warp. `length`: blocks of a row.
Config choose(DType dtype, std::int64_t rows, std::int64_t cols, const Family& family, int length) {
  const auto kept = kept_choices(dtype, family);
  const bool rare = !family.aligned || family.extras == SoftmaxExtras::mixed;
  Config config{dtype, 1, cols < 32 ? 8 : 32, kept.back(), 32, 1, kMostThreads};
  if (family.aligned) {
    config.run = kVector / static_cast<int>(size_of(dtype));
    config.block_lanes = power_of_two_from(cols / config.run);
  }
  const std::int64_t block_step = static_cast<std::int64_t>(config.block_lanes) * config.run;
  const std::int64_t row_runs = length * ((cols + block_step - 1) / block_step * config.block_lanes);
  const int threads =
      std::clamp(power_of_two_from((row_runs + kept.back() - 1) / kept.back()), config.block_lanes, kMostThreads);
  if (rare) {
    config.lanes = family.aligned ? std::max(8, config.block_lanes) : 32;
    config.warps = std::clamp(threads / config.lanes, 1, 16);
    return config;
  }
  const int most_rows =
      std::min(32 / config.block_lanes, static_cast<int>(std::bit_floor(static_cast<std::uint64_t>(rows))));
  const std::int64_t row_bytes = cols * static_cast<std::int64_t>(size_of(dtype));
  const int piece_rows = std::min(most_rows, power_of_two_from((kPiece + row_bytes - 1) / row_bytes));
  config.lanes = std::max(std::clamp(threads, 32 / most_rows, 32 / piece_rows), threads / 16);
  config.warps = std::max(1, threads / config.lanes);
  if (config.warps <= 8) {
    if (config.warps <= 4 && family.extras == SoftmaxExtras::none) {  // sums fill the register file either way
      config.most_threads = kFewThreads;
    }
    const std::int64_t on_row = config.lanes * config.warps, share = (row_runs + on_row - 1) / on_row;
    // Of the kernels for many threads, which are few, only the last choices.
    const auto first = config.warps <= 4 ? kept.begin() : kept.end() - std::min<std::ptrdiff_t>(2, std::ssize(kept));
    const auto enough = std::lower_bound(first, kept.end(), share);
    config.kept = enough == kept.end() ? kept.back() : *enough;
  }
  return config;
}

SoftmaxTasks tasks(const Config& config, const Plan& plan, std::int64_t batch, const BlockLayout::Sizes& s) {
  const std::int64_t block_rows = s.block_rows, warp_rows = 32 / config.lanes,
                     row_groups = (block_rows + warp_rows - 1) / warp_rows;
  const std::int64_t count = plan.line_count * batch * row_groups;
  if (count > std::numeric_limits<int>::max()) {
    throw Error("block_softmax", "values", "fewer than 2^31 groups of rows", std::to_string(count));
  }
  return {static_cast<unsigned>(count),
          static_cast<int>(block_rows),
          static_cast<int>(s.block_cols),
          std::countr_zero(static_cast<unsigned>(config.warps)),
          Divisor(row_groups),
          Divisor(std::max<std::int64_t>(batch, 1))};
}

bool takes_vectors(const Packed& p, DType dtype, std::int64_t cols) {
  return size_of(dtype) <= 4 && p.col == 1 && is_aligned(p.data, {p.z, p.block, p.row, cols}, size_of(dtype), kVector);
}

/// Whether runs as long as 16 bytes of `values` can be read.
bool takes_vectors(const Dense& d, DType values) {
  const std::size_t bytes = kVector / size_of(values) * size_of(d.dtype);
  return d.col == 1 && is_aligned(d.data, {d.z, d.h, d.row}, size_of(d.dtype), std::min<std::size_t>(bytes, kVector));
}

SoftmaxPacked params(const Packed& p) { return {p.data, p.z, p.block, p.row, p.col}; }

SoftmaxType type_of(DType dtype) {
  return dtype == DType::f64    ? SoftmaxType::f64
         : dtype == DType::f32  ? SoftmaxType::f32
         : dtype == DType::f16  ? SoftmaxType::f16
         : dtype == DType::bf16 ? SoftmaxType::bf16
                                : SoftmaxType::boolean;
}

SoftmaxDense params(const Dense& d) {
  return {d.data, d.z, d.h, d.row, d.col, type_of(d.dtype), d.mode == MaskMode::mul};
}

/// What there is of rpe and masks; those that take entries out come last.
std::vector<Dense> extras_of(const Problem& problem) {
  std::vector<Dense> extras{problem.rpe, problem.key_padding, problem.attn};
  std::erase_if(extras, [](const Dense& d) { return d.data == nullptr; });
  std::stable_partition(extras.begin(), extras.end(), [](const Dense& d) { return d.mode == MaskMode::add; });
  return extras;
}

Family family_of(const Problem& problem) {
  const std::int64_t cols = problem.layout->sizes().block_cols;
  const std::vector<Dense> extras = extras_of(problem);
  const bool same = std::all_of(extras.begin(), extras.end(), [&](const Dense& d) { return d.dtype == problem.dtype; });
  const bool aligned =
      takes_vectors(problem.values, problem.dtype, cols) && takes_vectors(problem.out, problem.dtype, cols) &&
      std::all_of(extras.begin(), extras.end(), [&](const Dense& d) { return takes_vectors(d, problem.dtype); });
  return {false,
          extras.empty()    ? SoftmaxExtras::none
          : same && aligned ? SoftmaxExtras::same
                            : SoftmaxExtras::mixed,
          aligned};
}

Family family_of(const BackwardProblem& problem) {
  bool aligned = true;
  for (const Packed* tensor : {&problem.out, &problem.d_out, &problem.d_values}) {
    aligned = aligned && takes_vectors(*tensor, problem.dtype, problem.layout->sizes().block_cols);
  }
  return {true, SoftmaxExtras::none, aligned};
}

KernelSpec spec(const Config& config, const Family& family) {
  if (family.backward) {
    return {kSource, "fretwork::block_softmax_backward<" + config.text() + ">"};
  }
  const char* const extras = family.extras == SoftmaxExtras::none   ? "none"
                             : family.extras == SoftmaxExtras::same ? "same"
                                                                    : "mixed";
  return {kSource, "fretwork::block_softmax<" + config.text() + ", fretwork::SoftmaxExtras::" + extras + ">"};
}

KernelSpec rpe_spec(DType dtype, int threads) {
  return {kSource, std::string("fretwork::block_softmax_rpe_backward<") + device_type(dtype) + ", " +
                       std::to_string(threads) + ">"};
}

template <typename P>
Config config_for(const P& problem, int length) {
  const auto& s = problem.layout->sizes();
  return choose(problem.dtype, s.block_rows, s.block_cols, family_of(problem), length);
}

void rpe_backward(const BackwardProblem& p, const void* dots, Context& context) {
  const auto plan = plan_for<RpePlan>(*p.layout, context, make_rpe_plan);
  const auto& s = p.layout->sizes();
  const auto& [z, h, rows, cols] = p.rpe_sizes;
  const std::int64_t all_rows = s.rows * s.block_rows, all_cols = s.cols * s.block_cols;
  const auto summed = [](std::int64_t size, std::int64_t full) { return size == full ? std::int64_t{1} : full; };
  SoftmaxRpeParams q{};
  q.block_at = static_cast<const int*>(plan->block_at.data());
  q.out = params(p.out);
  q.d_out = params(p.d_out);
  q.dots = dots;
  q.d_rpe = params(p.d_rpe);
  std::copy_n(std::initializer_list<long long>{z, h, rows, cols}.begin(), 4, q.sizes);
  std::copy_n(std::initializer_list<long long>{summed(z, p.batch), summed(h, s.heads), summed(rows, all_rows),
                                               summed(cols, all_cols)}
                  .begin(),
              4, q.summed);
  q.heads = s.heads;
  q.rows = all_rows;
  q.cols = all_cols;
  q.block_rows = static_cast<int>(s.block_rows);
  q.block_cols = static_cast<int>(s.block_cols);
  const int threads = q.summed[2] == 1 && q.summed[3] == 1 ? 1 : 256;
  const std::int64_t elements = z * h * rows * cols;
  if (elements > 0) {
    const Kernel& kernel = get_kernel(rpe_spec(p.dtype, threads), context.device.index);
    kernel.launch(threads == 1 ? (elements + 255) / 256 : elements, 256, 0, &q, context.stream);
  }
}

}  // namespace

std::string kernel_name(const Problem& problem, int length) {
  return spec(config_for(problem, length), family_of(problem)).instance;
}
std::string kernel_name(const BackwardProblem& problem, int length) {
  return spec(config_for(problem, length), family_of(problem)).instance;
}

void forward(const Problem& problem, Context& context) {
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const auto& s = problem.layout->sizes();
  const auto plan = plan_for<Plan>(*problem.layout, context, make_plan);
  const Config config = config_for(problem, plan->length);
  SoftmaxParams p{};
  p.lines = static_cast<const SoftmaxLine*>(plan->lines.data());
  p.columns = static_cast<const int*>(plan->columns.data());
  p.values = params(problem.values);
  p.out = params(problem.out);
  for (const Dense& extra : extras_of(problem)) {
    p.extras[p.extra_count++] = params(extra);
  }
  p.scale = problem.scale;
  p.tasks = tasks(config, *plan, problem.batch, s);
  const Kernel& kernel = get_kernel(spec(config, family_of(problem)), context.device.index);
  kernel.launch(config.grid(p.tasks), config.threads(), 0, &p, context.stream);
}

void backward(const BackwardProblem& problem, Context& context) {
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const auto& s = problem.layout->sizes();
  const auto plan = plan_for<Plan>(*problem.layout, context, make_plan);
  const bool dots = problem.d_rpe.data != nullptr;
  const std::int64_t rows = s.rows * s.block_rows;
  const std::size_t accumulator = problem.dtype == DType::f64 ? sizeof(double) : sizeof(float);
  const Workspace workspace(context, dots ? static_cast<std::size_t>(problem.batch * s.heads * rows) * accumulator : 0);
  const Config config = config_for(problem, plan->length);
  SoftmaxBackwardParams p{};
  p.lines = static_cast<const SoftmaxLine*>(plan->lines.data());
  p.out = params(problem.out);
  p.d_out = params(problem.d_out);
  p.d_values = params(problem.d_values);
  p.dots = dots ? workspace.data() : nullptr;
  p.scale = problem.scale;
  p.tasks = tasks(config, *plan, problem.batch, s);
  p.heads = s.heads;
  p.rows = rows;
  if (p.tasks.count > 0) {
    const Kernel& kernel = get_kernel(spec(config, family_of(problem)), context.device.index);
    kernel.launch(config.grid(p.tasks), config.threads(), 0, &p, context.stream);
  }
  if (dots) {
    rpe_backward(problem, workspace.data(), context);
  }
}

namespace {

constexpr DType kFloating[] = {DType::f64, DType::f32, DType::f16, DType::bf16};
constexpr Family kFamilies[] = {{false, SoftmaxExtras::none, true},   {false, SoftmaxExtras::same, true},
                                {false, SoftmaxExtras::mixed, true},  {false, SoftmaxExtras::none, false},
                                {false, SoftmaxExtras::mixed, false}, {true, SoftmaxExtras::none, true},
                                {true, SoftmaxExtras::none, false}};

/// Everything that `choose` can answer: rows matter by their power of two, columns as they are, and a length no more
/// once every thread is taken.
std::vector<KernelSpec> list(const std::string& /*arch*/) {
  std::set<std::string> seen;
  std::vector<KernelSpec> specs;
  const auto add = [&](const KernelSpec& kernel) {
    if (seen.insert(kernel.instance).second) {
      specs.push_back(kernel);
    }
  };
  for (const DType dtype : kFloating) {
    for (const Family& family : kFamilies) {
      const std::int64_t step = family.aligned ? kVector / static_cast<std::int64_t>(size_of(dtype)) : 1;
      if (family.aligned && dtype == DType::f64) {
        continue;
      }
      for (std::int64_t cols = 8; cols <= 128; cols += step) {
        for (std::int64_t rows = 8; rows <= 128; rows *= 2) {
          const int longest = kMostThreads * kept_choices(dtype, family).back();
          for (int length = 1; length * cols <= longest * step + cols; ++length) {
            add(spec(choose(dtype, rows, cols, family, length), family));
          }
        }
      }
    }
    for (const int threads : {1, 256}) {
      add(rpe_spec(dtype, threads));
    }
  }
  return specs;
}

const KernelList kernels("block_softmax", list, kLeastArch);

}  // namespace

}  // namespace fretwork::block_softmax_op::cuda
