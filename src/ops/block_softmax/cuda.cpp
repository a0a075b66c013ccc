// Softmax and its gradient on a GPU: choose, fill parameters, get the kernel, launch.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/block_softmax/params.h"
#include "ops/block_softmax/problem.h"
#include "runtime/kernels.h"
#include "runtime/plan_cache.h"

namespace fretwork::block_softmax_op::cuda {
namespace {

using fretwork::cuda::DeviceBuffer;

constexpr const char* kSource = "ops/block_softmax/kernel.cuh";
constexpr int kVector = 16;  // bytes of one access

/// The layout on the device: lines with blocks, longest first, and the block column of each block.
struct Plan {
  DeviceBuffer lines, columns;
  std::int64_t line_count = 0;
  int longest = 0;
};

/// The packed block of each place, for rpe's gradient.
struct RpePlan {
  DeviceBuffer block_at;
};

template <typename T>
DeviceBuffer upload(const std::vector<T>& host, int device) {
  return host.empty() ? DeviceBuffer() : DeviceBuffer(device, host.data(), host.size() * sizeof(T));
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
          lines.empty() ? 0 : lines.front().count};
}

RpePlan make_rpe_plan(const BlockLayout& layout, int device) {
  const auto& s = layout.sizes();
  std::vector<int> block_at(static_cast<std::size_t>(s.heads * s.rows * s.cols), -1);
  for (std::int64_t l = 0; l < s.heads * s.rows; ++l) {
    for (const auto& entry : layout.by_row().line(l)) {
      block_at[static_cast<std::size_t>(l * s.cols + entry.other)] = static_cast<int>(entry.block);
    }
  }
  return {upload(block_at, device)};
}

/// The cached plan of a layout on the context's device, kept for good once a graph refers to it.
template <typename P>
std::shared_ptr<const P> plan_for(const BlockLayout& layout, Context& context, P (*make)(const BlockLayout&, int)) {
  static PlanCache<P>& cache = *std::make_unique<PlanCache<P>>().release();
  const int device = context.device.index;
  auto plan = cache.get(hash128(layout.key() + "@" + std::to_string(device)), [&] { return make(layout, device); });
  if (fretwork::cuda::is_capturing(context.stream)) {
    cache.pin(plan);
  }
  return plan;
}

const char* type_name(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "double";
    case DType::f32:
      return "float";
    case DType::f16:
      return "fretwork::f16";
    case DType::bf16:
      return "fretwork::bf16";
    default:
      return "bool";
  }
}

/// How a kernel is instantiated: what is kept in registers, and by how many warps.
struct Config {
  DType dtype;
  int cols;       ///< of a block
  bool vector;    ///< runs of 16 bytes
  int kept;       ///< runs a thread keeps
  int warps;      ///< on one line
  int warp_rows;  ///< rows a warp takes

  int run() const { return vector ? kVector / static_cast<int>(size_of(dtype)) : 1; }
  int threads() const { return warps == 1 ? 128 : 32 * warps; }
  /// CTAs for so many lines of blocks of `rows` rows.
  std::int64_t tasks(std::int64_t lines, std::int64_t batch, std::int64_t rows) const {
    return lines * batch * ((rows + warp_rows - 1) / warp_rows);
  }
  std::int64_t grid(std::int64_t tasks) const { return warps == 1 ? (tasks + 3) / 4 : tasks; }
  std::string text() const {
    return std::string(type_name(dtype)) + ", " + std::to_string(cols) + ", " + (vector ? "true" : "false") + ", " +
           std::to_string(kept) + ", " + std::to_string(warps);
  }
};

int power_of_two_from(int n) { return static_cast<int>(std::bit_ceil(static_cast<unsigned>(n))); }

/// `most`: runs that a thread can keep without crowding others out of the register file.
Config choose(DType dtype, std::int64_t cols, bool vector, int longest, int most) {
  Config config{dtype, static_cast<int>(cols), vector, 1, 1, 1};
  const int runs = (config.cols + config.run() - 1) / config.run();
  const int lanes = std::min(32, power_of_two_from(runs));
  const std::int64_t steps = static_cast<std::int64_t>(longest) * ((runs + lanes - 1) / lanes);
  config.warp_rows = 32 / lanes;
  config.warps = steps <= most ? 1 : steps <= 4 * most ? 4 : 16;
  const std::int64_t share = (steps + config.warps - 1) / config.warps;
  config.kept = static_cast<int>(std::min<std::int64_t>(most, power_of_two_from(static_cast<int>(share))));
  return config;
}

/// True when every place that `strides` reach is a multiple of `bytes`.
bool aligned(const void* data, std::initializer_list<std::int64_t> strides, std::size_t element, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 &&
         std::all_of(strides.begin(), strides.end(),
                     [&](std::int64_t s) { return static_cast<std::size_t>(s < 0 ? -s : s) * element % bytes == 0; });
}

bool takes_vectors(const Packed& p, DType dtype, std::int64_t cols) {
  return p.col == 1 && aligned(p.data, {p.z, p.block, p.row, cols}, size_of(dtype), kVector);
}

SoftmaxPacked params(const Packed& p) { return {p.data, p.z, p.block, p.row, p.col}; }

SoftmaxDense params(const Dense& d, int run) {
  const std::size_t bytes = static_cast<std::size_t>(run) * size_of(d.dtype);
  const std::size_t access = bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : size_of(d.dtype);
  const bool vector = run > 1 && d.col == 1 && aligned(d.data, {d.z, d.h, d.row}, size_of(d.dtype), access);
  return {d.data, d.z, d.h, d.row, d.col, vector};
}

std::string kind_name(const Dense& d) {
  if (d.data == nullptr) {
    return "fretwork::none";
  }
  return std::string(d.mode == MaskMode::add ? "fretwork::adds<" : "fretwork::multiplies<") + type_name(d.dtype) + ">";
}

KernelSpec forward_spec(const Config& config, const Dense& rpe, const Dense& key_padding, const Dense& attn) {
  return {kSource, "fretwork::block_softmax<" + config.text() + ", " + kind_name(rpe) + ", " + kind_name(key_padding) +
                       ", " + kind_name(attn) + ">"};
}

KernelSpec backward_spec(const Config& config, bool dots) {
  return {kSource, "fretwork::block_softmax_backward<" + config.text() + (dots ? ", true>" : ", false>")};
}

KernelSpec rpe_spec(DType dtype, DType rpe, int threads) {
  return {kSource, std::string("fretwork::block_softmax_rpe_backward<") + type_name(dtype) + ", " + type_name(rpe) +
                       ", " + std::to_string(threads) + ">"};
}

/// Without extras 16-bit runs stay packed; sums with extras need a register for each element.
int most_kept(const Problem& p) {
  const bool extras = p.rpe.data != nullptr || p.key_padding.data != nullptr || p.attn.data != nullptr;
  return extras && size_of(p.dtype) == 2 ? 4 : 8;
}
constexpr int kMostKeptBackward = 4;  // of two tensors

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
  q.d_rpe = params(p.d_rpe, 1);
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
    const Kernel& kernel = get_kernel(rpe_spec(p.dtype, p.d_rpe.dtype, threads), context.device.index);
    kernel.launch(threads == 1 ? (elements + 255) / 256 : elements, 256, 0, &q, context.stream);
  }
}

}  // namespace

void forward(const Problem& problem, Context& context) {
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const auto& s = problem.layout->sizes();
  const auto plan = plan_for<Plan>(*problem.layout, context, make_plan);
  const bool vector = takes_vectors(problem.values, problem.dtype, s.block_cols) &&
                      takes_vectors(problem.out, problem.dtype, s.block_cols);
  const Config config = choose(problem.dtype, s.block_cols, vector, plan->longest, most_kept(problem));
  SoftmaxParams p{};
  p.lines = static_cast<const SoftmaxLine*>(plan->lines.data());
  p.columns = static_cast<const int*>(plan->columns.data());
  p.values = params(problem.values);
  p.out = params(problem.out);
  p.rpe = params(problem.rpe, config.run());
  p.key_padding = params(problem.key_padding, config.run());
  p.attn = params(problem.attn, config.run());
  p.scale = problem.scale;
  p.tasks = config.tasks(plan->line_count, problem.batch, s.block_rows);
  p.batch = problem.batch;
  p.block_rows = static_cast<int>(s.block_rows);
  const Kernel& kernel =
      get_kernel(forward_spec(config, problem.rpe, problem.key_padding, problem.attn), context.device.index);
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
  bool vector = true;
  for (const Packed* tensor : {&problem.out, &problem.d_out, &problem.d_values}) {
    vector = vector && takes_vectors(*tensor, problem.dtype, s.block_cols);
  }
  const Config config = choose(problem.dtype, s.block_cols, vector, plan->longest, kMostKeptBackward);
  SoftmaxBackwardParams p{};
  p.lines = static_cast<const SoftmaxLine*>(plan->lines.data());
  p.out = params(problem.out);
  p.d_out = params(problem.d_out);
  p.d_values = params(problem.d_values);
  p.dots = workspace.data();
  p.scale = problem.scale;
  p.tasks = config.tasks(plan->line_count, problem.batch, s.block_rows);
  p.batch = problem.batch;
  p.heads = s.heads;
  p.rows = rows;
  p.block_rows = static_cast<int>(s.block_rows);
  if (p.tasks > 0) {
    const Kernel& kernel = get_kernel(backward_spec(config, dots), context.device.index);
    kernel.launch(config.grid(p.tasks), config.threads(), 0, &p, context.stream);
  }
  if (dots) {
    rpe_backward(problem, workspace.data(), context);
  }
}

namespace {

/// The usual types and blocks, and some with extras; the rest is compiled when first asked for.
std::vector<KernelSpec> list(const std::string& /*arch*/) {
  std::vector<KernelSpec> specs;
  Dense rpe, mask;
  rpe.data = mask.data = &rpe;  // only its being there matters
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int cols : {16, 32, 64, 128}) {
      specs.push_back(forward_spec(choose(dtype, cols, true, 32, 8), {}, {}, {}));
      specs.push_back(backward_spec(choose(dtype, cols, true, 16, kMostKeptBackward), false));
    }
    for (const int longest : {8, 128}) {
      specs.push_back(forward_spec(choose(dtype, 32, true, longest, 8), {}, {}, {}));
    }
    rpe.dtype = mask.dtype = dtype;
    mask.mode = MaskMode::mul;
    const Config config = choose(dtype, 32, true, 16, size_of(dtype) == 2 ? 4 : 8);
    specs.push_back(forward_spec(config, rpe, {}, {}));
    specs.push_back(forward_spec(config, rpe, mask, mask));
    specs.push_back(forward_spec(choose(dtype, 32, false, 16, 8), {}, {}, {}));
    specs.push_back(backward_spec(choose(dtype, 32, true, 16, kMostKeptBackward), true));
    specs.push_back(rpe_spec(dtype, dtype, 1));
    specs.push_back(rpe_spec(dtype, dtype, 256));
  }
  return specs;
}

const KernelList kernels("block_softmax", list);

}  // namespace

}  // namespace fretwork::block_softmax_op::cuda
