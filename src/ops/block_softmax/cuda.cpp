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
  int length = 0;  ///< blocks of a line that threads are chosen for
};

/// The packed block of each place, for rpe's gradient.
struct RpePlan {
  DeviceBuffer block_at;
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

/// How a kernel is instantiated: what a thread keeps in registers, and how many share a row.
struct Config {
  DType dtype;
  int cols;     ///< of a block
  bool vector;  ///< runs of 16 bytes
  int kept;     ///< runs a thread keeps
  int lanes;    ///< of a warp, on one row
  int warps;    ///< on one row

  int run() const { return vector ? kVector / static_cast<int>(size_of(dtype)) : 1; }
  int threads() const { return 32 * std::max(4, warps); }
  std::int64_t grid(const SoftmaxTasks& tasks) const {
    const int at_once = threads() / 32 / warps;
    return (static_cast<std::int64_t>(tasks.count) + at_once - 1) / at_once;
  }
  std::string text() const {
    return std::string(device_type(dtype)) + ", " + std::to_string(cols) + ", " + (vector ? "true" : "false") + ", " +
           std::to_string(kept) + ", " + std::to_string(lanes) + ", " + std::to_string(warps);
  }
};

int power_of_two_from(std::int64_t n) { return static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(n))); }

constexpr int kMostKept = 12, kMostKeptBackward = 8;  // of two tensors
constexpr int kPiece = 128;        // bytes of neighbouring rows that a warp reads from a block at least, if it can
constexpr int kMostThreads = 512;  // on a row

/// As few threads on a row as keep it in registers, since what a thread does besides its entries costs as much as some
/// twenty of them. `most`: runs that a thread can keep without crowding others out of the register file.
Config choose(DType dtype, std::int64_t rows, std::int64_t cols, bool vector, int length, int most) {
  Config config{dtype, static_cast<int>(cols), vector, 1, 1, 1};
  const int runs = (config.cols + config.run() - 1) / config.run();
  const int block_lanes = std::min(32, power_of_two_from(runs));
  const std::int64_t row_runs =
      static_cast<std::int64_t>(length) * ((runs + block_lanes - 1) / block_lanes * block_lanes);
  const int threads = std::clamp(power_of_two_from((row_runs + most - 1) / most), block_lanes, kMostThreads);
  const int most_rows = std::min(32 / block_lanes, static_cast<int>(std::bit_floor(static_cast<std::uint64_t>(rows))));
  const std::int64_t row_bytes = cols * static_cast<std::int64_t>(size_of(dtype));
  const int piece_rows = std::min(most_rows, power_of_two_from((kPiece + row_bytes - 1) / row_bytes));
  config.lanes = std::clamp(threads, 32 / most_rows, 32 / piece_rows);
  config.lanes = std::max(config.lanes, threads / 16);
  config.warps = std::max(1, threads / config.lanes);
  const std::int64_t share = (row_runs + config.lanes * config.warps - 1) / (config.lanes * config.warps);
  config.kept = static_cast<int>(std::min<std::int64_t>(most, (share + 1) / 2 * 2));  // even: half the kernels
  return config;
}

SoftmaxDivisor divisor(std::int64_t by) {
  const int bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(by - 1)));
  return {static_cast<unsigned>(by), static_cast<unsigned>((std::uint64_t{1} << (31 + bits)) / by + 1),
          static_cast<unsigned>(31 + bits)};
}

SoftmaxTasks tasks(const Config& config, const Plan& plan, std::int64_t batch, std::int64_t block_rows) {
  const std::int64_t warp_rows = 32 / config.lanes, row_groups = (block_rows + warp_rows - 1) / warp_rows;
  const std::int64_t count = plan.line_count * batch * row_groups;
  if (count > std::numeric_limits<int>::max()) {
    throw Error("block_softmax", "values", "fewer than 2^31 groups of rows", std::to_string(count));
  }
  return {static_cast<unsigned>(count), static_cast<int>(block_rows), divisor(row_groups),
          divisor(std::max<std::int64_t>(batch, 1))};
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
  return std::string(d.mode == MaskMode::add ? "fretwork::adds<" : "fretwork::multiplies<") + device_type(d.dtype) +
         ">";
}

KernelSpec forward_spec(const Config& config, const Dense& rpe, const Dense& key_padding, const Dense& attn) {
  return {kSource, "fretwork::block_softmax<" + config.text() + ", " + kind_name(rpe) + ", " + kind_name(key_padding) +
                       ", " + kind_name(attn) + ">"};
}

KernelSpec backward_spec(const Config& config, bool dots) {
  return {kSource, "fretwork::block_softmax_backward<" + config.text() + (dots ? ", true>" : ", false>")};
}

KernelSpec rpe_spec(DType dtype, DType rpe, int threads) {
  return {kSource, std::string("fretwork::block_softmax_rpe_backward<") + device_type(dtype) + ", " + device_type(rpe) +
                       ", " + std::to_string(threads) + ">"};
}

/// Sums with extras need a register for each element, all else stays packed as it came.
int most_kept(const Problem& p) {
  const bool extras = p.rpe.data != nullptr || p.key_padding.data != nullptr || p.attn.data != nullptr;
  return extras && size_of(p.dtype) == 2 ? 4 : extras || p.dtype == DType::f64 ? 8 : kMostKept;
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
  const Config config = choose(problem.dtype, s.block_rows, s.block_cols, vector, plan->length, most_kept(problem));
  SoftmaxParams p{};
  p.lines = static_cast<const SoftmaxLine*>(plan->lines.data());
  p.columns = static_cast<const int*>(plan->columns.data());
  p.values = params(problem.values);
  p.out = params(problem.out);
  p.rpe = params(problem.rpe, config.run());
  p.key_padding = params(problem.key_padding, config.run());
  p.attn = params(problem.attn, config.run());
  p.scale = problem.scale;
  p.tasks = tasks(config, *plan, problem.batch, s.block_rows);
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
  const Config config = choose(problem.dtype, s.block_rows, s.block_cols, vector, plan->length, kMostKeptBackward);
  SoftmaxBackwardParams p{};
  p.lines = static_cast<const SoftmaxLine*>(plan->lines.data());
  p.out = params(problem.out);
  p.d_out = params(problem.d_out);
  p.d_values = params(problem.d_values);
  p.dots = workspace.data();
  p.scale = problem.scale;
  p.tasks = tasks(config, *plan, problem.batch, s.block_rows);
  p.heads = s.heads;
  p.rows = rows;
  if (p.tasks.count > 0) {
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
      specs.push_back(forward_spec(choose(dtype, cols, cols, true, 32, kMostKept), {}, {}, {}));
      specs.push_back(backward_spec(choose(dtype, cols, cols, true, 16, kMostKeptBackward), false));
    }
    for (const int length : {8, 128}) {
      specs.push_back(forward_spec(choose(dtype, 32, 32, true, length, kMostKept), {}, {}, {}));
    }
    rpe.dtype = mask.dtype = dtype;
    mask.mode = MaskMode::mul;
    const Config config = choose(dtype, 32, 32, true, 16, size_of(dtype) == 2 ? 4 : 8);
    specs.push_back(forward_spec(config, rpe, {}, {}));
    specs.push_back(forward_spec(config, rpe, mask, mask));
    specs.push_back(forward_spec(choose(dtype, 32, 32, false, 16, kMostKept), {}, {}, {}));
    specs.push_back(backward_spec(choose(dtype, 32, 32, true, 16, kMostKeptBackward), true));
    specs.push_back(rpe_spec(dtype, dtype, 1));
    specs.push_back(rpe_spec(dtype, dtype, 256));
  }
  return specs;
}

const KernelList kernels("block_softmax", list);

}  // namespace

}  // namespace fretwork::block_softmax_op::cuda
