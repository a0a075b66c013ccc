// SPLAT's operators on a GPU: copy the progressions once, fill parameters, get the kernel, launch.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/regular/params.h"
#include "ops/regular/problem.h"
#include "runtime/kernels.h"
#include "runtime/plan_cache.h"

namespace fretwork::regular_op::cuda {
namespace {

using fretwork::cuda::DeviceBuffer;

constexpr const char* kSource = "ops/regular/kernel.cuh";
constexpr int kThreads = 256;           // of a CTA, a warp for each line
constexpr std::int64_t kLongRow = 512;  // entries from which a row's softmax takes several warps
constexpr int kManyWarps = 8;

/// A pattern's progressions on the device.
struct Plan {
  DeviceBuffer lines, list;
  std::size_t bytes() const { return lines.bytes() + list.bytes(); }
};

int narrowed(std::int64_t n) {
  if (n > std::numeric_limits<int>::max()) {
    throw Error("fretwork", "pattern", "sizes below 2^31 on a GPU", std::to_string(n));
  }
  return static_cast<int>(n);
}

template <typename T>
DeviceBuffer upload(const std::vector<T>& host, int device) {
  return host.empty() ? DeviceBuffer() : DeviceBuffer(device, host.data(), host.size() * sizeof(T));
}

Plan make_plan(const std::vector<Progression>& lines, const std::vector<std::int64_t>& list, int device) {
  std::vector<RegularLine> narrow_lines;
  narrow_lines.reserve(lines.size());
  for (const Progression& line : lines) {
    narrow_lines.push_back({narrowed(line.start), narrowed(line.stride), narrowed(line.count)});
  }
  std::vector<int> narrow_list(list.size());
  std::ranges::transform(list, narrow_list.begin(), narrowed);
  return {upload(narrow_lines, device), upload(narrow_list, device)};
}

/// Remembered by pattern and device, and kept for good once a graph refers to it.
template <typename Make>
std::shared_ptr<const Plan> remember(const std::string& what, Context& context, const Make& make) {
  static PlanCache<Plan>& cache = *std::make_unique<PlanCache<Plan>>().release();
  auto plan = cache.get(hash128(what + "@" + std::to_string(context.device.index)), make);
  if (fretwork::cuda::is_capturing(context.stream)) {
    cache.pin(plan);
  }
  return plan;
}

std::shared_ptr<const Plan> row_plan(const RegularPattern& pattern, Context& context) {
  return remember("rows " + pattern.key(), context,
                  [&] { return make_plan(rows_of(pattern)->lines, {}, context.device.index); });
}

std::shared_ptr<const Plan> column_plan(const RegularPattern& pattern, Context& context) {
  return remember("columns " + pattern.key(), context, [&] {
    const auto columns = columns_of(pattern);
    return make_plan(columns->lines, columns->list, context.device.index);
  });
}

RegularOperand params(const Operand& o) { return {o.data, o.batch, o.head, o.row, o.col}; }

/// Elements that a lane adds up: what a warp needs for the whole depth, 4 at most.
int elements_of_lane(std::int64_t depth) { return depth <= 32 ? 1 : depth <= 64 ? 2 : 4; }

KernelSpec spec(Result result, DType dtype, int elements) {
  const std::string type = device_type(dtype);
  if (result == Result::values) {
    return {kSource, "fretwork::regular_values<" + type + ">"};
  }
  return {kSource, std::string("fretwork::") + (result == Result::by_row ? "regular_by_row<" : "regular_by_col<") +
                       type + ", " + std::to_string(elements) + ">"};
}

KernelSpec softmax_spec(bool backward, DType dtype, int warps) {
  return {kSource, std::string("fretwork::regular_softmax") + (backward ? "_backward<" : "<") + device_type(dtype) +
                       ", " + std::to_string(warps) + ">"};
}

/// Kernels count lines in 32 bits.
std::int64_t checked_tasks(std::int64_t count) {
  if (count > std::numeric_limits<int>::max()) {
    throw Error("fretwork", "rows", "fewer than 2^31 rows of all batches and heads", std::to_string(count));
  }
  return count;
}

}  // namespace

void run(const Product& p, Context& context) {
  const bool columns = p.result == Result::by_col;
  const int elements = elements_of_lane(p.depth);
  RegularParams q{};
  q.chunks = p.result == Result::values ? 1 : narrowed((p.depth + 32 * elements - 1) / (32 * elements));
  const std::int64_t tasks = checked_tasks(p.batch * (columns ? p.kv_heads * p.cols : p.heads * p.rows) * q.chunks);
  if (tasks == 0) {
    return;
  }
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const auto by_rows = row_plan(*p.pattern, context);
  const auto by_columns = columns ? column_plan(*p.pattern, context) : nullptr;
  q.rows = static_cast<const RegularLine*>(by_rows->lines.data());
  if (columns) {
    q.columns = static_cast<const RegularLine*>(by_columns->lines.data());
    q.list = static_cast<const int*>(by_columns->list.data());
  }
  q.tasks = static_cast<unsigned>(tasks);
  q.values = params(p.values);
  q.by_row = params(p.by_row);
  q.by_col = params(p.by_col);
  q.heads = narrowed(p.heads);
  q.group = narrowed(p.heads / p.kv_heads);
  q.row_count = narrowed(p.rows);
  q.col_count = narrowed(p.cols);
  q.width = narrowed(p.width);
  q.depth = narrowed(p.depth);
  const Kernel& kernel = get_kernel(spec(p.result, p.dtype, elements), context.device.index);
  constexpr int kWarps = kThreads / 32;
  kernel.launch((tasks + kWarps - 1) / kWarps, kThreads, 0, &q, context.stream);
}

void run(const Softmax& s, Context& context) {
  const std::int64_t tasks = checked_tasks(s.batch * s.heads * s.rows);
  if (tasks * s.width == 0) {
    return;
  }
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const auto plan = row_plan(*s.pattern, context);
  RegularSoftmaxParams q{};
  q.rows = static_cast<const RegularLine*>(plan->lines.data());
  q.in = params(s.in);
  q.d_out = params(s.d_out);
  q.out = params(s.out);
  q.scale = static_cast<float>(s.scale);
  q.heads = narrowed(s.heads);
  q.row_count = narrowed(s.rows);
  q.width = narrowed(s.width);
  const int warps = s.width < kLongRow ? 1 : kManyWarps;
  const Kernel& kernel = get_kernel(softmax_spec(s.d_out.data != nullptr, s.dtype, warps), context.device.index);
  kernel.launch(tasks, 32 * warps, 0, &q, context.stream);
}

namespace {

std::vector<KernelSpec> list(const std::string& /*arch*/) {
  std::vector<KernelSpec> specs;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    specs.push_back(spec(Result::values, dtype, 0));
    for (const int elements : {1, 2, 4}) {
      specs.push_back(spec(Result::by_row, dtype, elements));
      specs.push_back(spec(Result::by_col, dtype, elements));
    }
    for (const int warps : {1, kManyWarps}) {
      specs.push_back(softmax_spec(false, dtype, warps));
      specs.push_back(softmax_spec(true, dtype, warps));
    }
  }
  return specs;
}

const KernelList kernels("regular", list);

}  // namespace

}  // namespace fretwork::regular_op::cuda
