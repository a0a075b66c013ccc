// Copies on a GPU: weights into the orders that kernels read (in registers, 16 bytes at a time, for the usual strides;
// through shared memory, one element at a time, for all others), rows of neighbouring δ into lines of one δ, and
// weights from and to dense matrices.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "runtime/alignment.h"
#include "runtime/cost.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker {
namespace {

using hopper::PackParams;
using hopper::RegroupParams;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;

/// The unsigned type of an element's bits.
std::string bits_of(int bytes) { return "fretwork::u" + std::to_string(8 * bytes); }

KernelSpec pack_instance(DType dtype, bool tf32) {
  return kernel_spec("pack", 0, "hopper::pack", tf32 ? "float" : bits_of(size_of(dtype) == 2 ? 2 : 4));
}
KernelSpec pack_dense_instance(DType dtype) {
  return kernel_spec("pack", 0, "hopper::pack_dense", size_of(dtype) == 2 ? bits_of(2) : "float");
}
KernelSpec strided_instance(DType dtype, int deltas) { return kernel_spec("pack", 0, "strided::pack", dtype, deltas); }
/// `whole`: fp32 with d = 4.
KernelSpec regroup_instance(int bytes, int deltas, bool back, bool whole) {
  return kernel_spec("pack", 0, "hopper::regroup", bits_of(bytes), deltas, back, whole);
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list{pack_instance(DType::f16, false), pack_instance(DType::f32, false)};
  if (fretwork::cuda::arch_number(arch) < 80) {
    return list;
  }
  if (arch == "sm_90a") {
    list.push_back(pack_instance(DType::f32, true));
    list.push_back(pack_dense_instance(DType::f16));
    list.push_back(pack_dense_instance(DType::f32));
  }
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (int v = 32 / bytes_of(dtype); v >= 2; v /= 2) {
      list.push_back(strided_instance(dtype, v));
    }
  }
  for (const auto& [bytes, deltas, whole] :
       {std::tuple{2, 2, false}, {2, 4, false}, {2, 8, false}, {4, 2, false}, {4, 4, false}, {4, 4, true}}) {
    list.push_back(regroup_instance(bytes, deltas, false, whole));
    if (arch == "sm_90a" || bytes == 4) {
      list.push_back(regroup_instance(bytes, deltas, true, whole));
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels, kLeastArch};

/// Packing by type (three), then regrouping by type, δ and way, the last of fp32 with d = 4, then packing dense blocks.
constinit KernelTable<3 + 2 * 6 + 2> kernels;

/// Lines of `entries`, as memory has them.
struct Shape {
  std::int64_t lines, entries, line, entry;  ///< how many, and the strides from one to the next
};

/// Where neighbours along l and the entries of a line follow each other, packing is regrouping: lines are the blocks of
/// a row, and the rows are i.
bool pack_in_registers(const Weights& w, const Sizes& s, const Shape& shape, DType dtype, const Lines& lines, void* to,
                       const Context& context) {
  const auto bytes = static_cast<std::int64_t>(size_of(dtype)), unit = 16 / bytes;
  const auto whole = [&](std::int64_t count, std::int64_t stride) { return count == 1 || stride % unit == 0; };
  const bool groups = s.d % unit == 0 || s.d == 4 || s.d == 2;
  if (!groups || w.d != 1 || shape.entry != s.d || shape.entries % 8 != 0 || !whole(shape.lines, shape.line) ||
      !whole(s.a, w.a) || !is_aligned(w.data, 16) || s.a * s.d >= kMost / shape.lines * 16 / shape.entries) {
    return false;
  }
  const std::int64_t deltas = std::min(s.d, unit), matrix = shape.lines * lines.pitch;
  RegroupParams params{};
  params.strided = w.data;
  params.strided_row = w.a;
  params.strided_block = shape.line;
  params.grouped = to;
  params.grouped_row = s.d * matrix;
  params.grouped_block = lines.pitch;
  params.grouped_delta = matrix;
  params.d = narrowed(s.d);
  params.total = narrowed(s.a * shape.lines * (shape.entries / 8) * (s.d / deltas));
  params.groups = Divisor(s.d / deltas);
  params.eights = Divisor(shape.entries / 8);
  params.a = Divisor(shape.lines);
  params.tf32 = lines.tf32;
  regroup(params, static_cast<int>(bytes), false, context);
  return true;
}

KernelSpec convert_instance(bool to_dense, int bytes, bool small) {
  return kernel_spec("pack", 0, "convert", bits_of(bytes), small ? "fretwork::u32" : "fretwork::i64", to_dense);
}

ConvertParams convert_params(const ConvertProblem& p) {
  const auto& s = p.sizes;
  ConvertParams q{};
  q.w = p.w.data;
  q.w_a = p.w.a;
  q.w_b = p.w.b;
  q.w_c = p.w.c;
  q.w_d = p.w.d;
  q.dense = p.dense.data;
  q.dense_row = p.dense.row;
  q.dense_col = p.dense.col;
  q.outside = reinterpret_cast<unsigned long long*>(p.outside);
  q.b = s.b;
  q.c = s.c;
  q.d = s.d;
  q.cols = s.a * s.c * s.d;
  q.total = s.a * s.b * s.d * q.cols;
  return q;
}

std::vector<KernelSpec> list_convert_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> specs;
  for (const bool to_dense : {false, true}) {
    for (const int bytes : {2, 4, 8}) {
      for (const bool small : {false, true}) {
        specs.push_back(convert_instance(to_dense, bytes, small));
      }
    }
  }
  return specs;
}

const KernelList kConvertKernels{"kronecker", list_convert_kernels, kLeastArch};

}  // namespace

void pack_dense(const Weights& w, const Sizes& s, DType dtype, const Lines& lines, void* to, const Context& context) {
  const Shape shape = lines.along_k ? Shape{s.b, s.c, w.b, w.c} : Shape{s.c, s.b, w.c, w.b};
  const std::int64_t units = lines.pitch * static_cast<std::int64_t>(size_of(dtype)) / 16;
  hopper::DensePackParams params{};
  params.from = w.data;
  params.to = to;
  params.stride_i = w.a;
  params.stride_p = shape.line;
  params.stride_q = shape.entry;
  params.stride_l = w.d;
  params.q = narrowed(shape.entries);
  params.line = narrowed(lines.pitch);
  params.total = narrowed(s.a * shape.lines * units);
  params.units = Divisor(units);
  params.p = Divisor(shape.lines);
  params.d = Divisor(s.d);
  kernels.get(size_of(dtype) == 2 ? 15 : 16, context.device.index, [&] { return pack_dense_instance(dtype); })
      .launch(ceil_div(params.total, hopper::kPackThreads), hopper::kPackThreads, 0, &params, context.stream);
}

void regroup(const RegroupParams& params, int bytes, bool back, const Context& context) {
  const int deltas = std::min(params.d, 16 / bytes);
  const bool whole = bytes == 4 && params.d == 4;
  const int place = (whole ? 5 : bytes / 4 * 3 + deltas / 4) * 2 + (back ? 1 : 0);
  kernels
      .get(3 + static_cast<std::size_t>(place), context.device.index,
           [&] { return regroup_instance(bytes, deltas, back, whole); })
      .launch(ceil_div(params.total, hopper::kRegroupThreads), hopper::kRegroupThreads, 0, &params, context.stream);
}

void pack(const Weights& w, const Sizes& s, DType dtype, const Lines& lines, void* to, const Context& context) {
  const Shape shape = lines.along_k ? Shape{s.b, s.c, w.b, w.c} : Shape{s.c, s.b, w.c, w.b};
  if (pack_in_registers(w, s, shape, dtype, lines, to, context)) {
    return;
  }
  // Neighbours in memory lie across the lines: a CTA takes whole ones.
  const bool by_rows = shape.lines > 1 && shape.entries > 1 && std::llabs(shape.line) < std::llabs(shape.entry) &&
                       s.d < 8 && shape.entries >= hopper::kPackLine && shape.entries * s.d <= hopper::kPackElements;
  // Small shares where there are few weights: a thread moves one element after the other.
  constexpr std::int64_t kManyCtas = 264, kLeast = 256;
  const std::int64_t deep = std::min<std::int64_t>(s.d, 32), whole = by_rows ? shape.entries : 1;
  const std::int64_t each = s.a * shape.lines * shape.entries * s.d / kManyCtas;
  const std::int64_t share = std::clamp<std::int64_t>(each, kLeast, hopper::kPackElements);
  const std::int64_t wide = std::max<std::int64_t>(share / deep / whole, 1) * whole;
  const std::int64_t wide_tiles = ceil_div(shape.lines * shape.entries, wide), deep_tiles = ceil_div(s.d, deep);
  PackParams params{};
  params.from = w.data;
  params.to = to;
  params.stride_i = w.a;
  params.stride_p = shape.line;
  params.stride_q = shape.entry;
  params.stride_l = w.d;
  params.p = narrowed(shape.lines);
  params.q = narrowed(shape.entries);
  params.d = narrowed(s.d);
  params.line = narrowed(lines.pitch);
  params.wide = narrowed(wide);
  params.deep = narrowed(deep);
  params.wide_tiles = narrowed(wide_tiles);
  params.deep_tiles = narrowed(deep_tiles);
  params.by_rows = by_rows ? 1 : 0;
  kernels
      .get(size_of(dtype) == 2 ? 0
           : lines.tf32        ? 2
                               : 1,
           context.device.index, [&] { return pack_instance(dtype, lines.tf32); })
      .launch(s.a * wide_tiles * deep_tiles, hopper::kPackThreads, 0, &params, context.stream);
}

void pack_strided(const Problem& problem, int deltas, int slab, int slabs, int steps, bool turned, void* to,
                  const Context& context) {
  const Sizes& s = problem.sizes;
  strided::PackParams params{};
  params.from = problem.w.data;
  params.to = to;
  params.stride_a = problem.w.a;
  params.stride_b = problem.w.b;
  params.stride_c = problem.w.c;
  params.stride_d = problem.w.d;
  params.rows = s.a * (s.d / deltas) * slabs * steps * slab;
  params.b = narrowed(s.b);
  params.c = narrowed(s.c);
  params.d = narrowed(s.d);
  params.slab = slab;
  params.slabs = slabs;
  params.steps = steps;
  params.turned = turned;
  const int size = bytes_of(problem.dtype), bytes = std::min(16, deltas * size);
  const Weights& w = problem.w;
  params.vector = w.d == 1 && is_aligned(w.data, {w.a, w.b, w.c}, size, bytes);
  get_kernel(strided_instance(problem.dtype, deltas), context.device.index)
      .launch(ceil_div(2 * params.rows, strided::kThreads), strided::kThreads, 0, &params, context.stream);
}

double regroup_cost(const Sizes& s, std::int64_t batch, DType dtype, double multiprocessors) {
  constexpr double kLaunches = 6.8;  // µs of two passes over nothing
  return cost::pass(kLaunches, 2 * batch_bytes(s, batch, dtype), cost::kMemory, multiprocessors);
}

bool regroups(const Matrix& m, std::int64_t width, std::int64_t batch, const Sizes& s, int bytes) {
  const std::int64_t unit = 16 / bytes;
  const bool groups = s.d % unit == 0 || s.d == 4 || s.d == 2;
  return groups && m.feature == 1 && width % 8 == 0 && m.batch % unit == 0 && is_aligned(m.data, 16) &&
         s.a * width * s.d * batch / 16 < kMost;
}

void regroup(const Matrix& m, void* grouped, std::int64_t width, std::int64_t batch, const Sizes& s, int bytes,
             bool back, const Context& context) {
  const std::int64_t groups = s.d / std::min<std::int64_t>(s.d, 16 / bytes);
  RegroupParams params{};
  params.strided = m.data;
  params.strided_row = m.batch;
  params.strided_block = width * s.d;
  params.grouped = grouped;
  params.grouped_row = s.a * s.d * width;
  params.grouped_block = s.d * width;
  params.grouped_delta = width;
  params.d = narrowed(s.d);
  params.total = narrowed(batch * s.a * groups * (width / 8));
  params.groups = Divisor(groups);
  params.eights = Divisor(width / 8);
  params.a = Divisor(s.a);
  regroup(params, bytes, back, context);
}

void cuda::convert(const ConvertProblem& problem, Context& context) {
  constexpr std::int64_t kPerBlock = kConvertThreads * kConvertElements;
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const ConvertParams p = convert_params(problem);
  const bool small = p.total <= std::numeric_limits<std::uint32_t>::max();
  if (!problem.to_dense) {
    fretwork::cuda::fill_ones(problem.outside, sizeof(*problem.outside), context.stream);  // none is outside
  }
  const Kernel& kernel =
      get_kernel(convert_instance(problem.to_dense, problem.element_bytes, small), context.device.index);
  kernel.launch((p.total + kPerBlock - 1) / kPerBlock, kConvertThreads, 0, &p, context.stream);
}

}  // namespace fretwork::kronecker
