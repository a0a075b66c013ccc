// Host side of the kernels that fuse two factors: which problems fit, tensor maps, launches.
#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/kronecker/cuda/families.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::kronecker::chain {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;

KernelSpec fused_instance(const Monarch& m, DType dtype) {
  return kernel_spec("chain", m.shared(), "chain::fused", dtype, m.q, m.r, m.s, m.p, m.ranks, m.first_warps,
                     m.second_warps, m.exchange);
}
/// Whether warpgroups can multiply it.
bool wide(const Monarch& m) { return m.q == 64 && m.r == 64 && m.s == 64 && m.p == 64; }
KernelSpec fused_pack_instance(const Monarch& m) {
  return kernel_spec("pack", 0, "chain::pack",
                     instance("chain::FusedOrder", m.q, m.r, m.s, m.p, m.ranks, m.first_warps, m.second_warps));
}
KernelSpec wide_pack_instance() {
  return kernel_spec("pack", 0, "chain::pack", "fretwork::kronecker::chain::WideOrder");
}
KernelSpec wide_instance(DType dtype) { return kernel_spec("chain_wide", Wide::kShared, "chain::fused_wide", dtype); }

/// With CTAs that swap results, where there is room for it: pairs of CTAs, and the fewest warps, each with more of the
/// weights, were the fastest on an H200.
Monarch arranged(const Monarch& m, const Arrangement& a) {
  Monarch with = m;
  with.exchange = std::min(m.ranks, a.exchange > 0 ? a.exchange : 2);
  with.first_warps = a.first_warps > 0 ? a.first_warps : 4;
  with.second_warps = a.second_warps > 0 ? a.second_warps : m.ranks == 8 ? 4 : 8;
  return with.valid() ? with : m;
}

/// Kernels are made for the sizes of a layer; these are the Monarch matrices of 1024, 2048 and 4096 features.
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (arch != "sm_90a") {
    return list;
  }
  for (const auto& [first, second] : {std::pair{Sizes{32, 32, 32, 1}, Sizes{1, 32, 32, 32}},
                                      {Sizes{32, 64, 64, 1}, Sizes{1, 32, 32, 64}},
                                      {Sizes{64, 64, 64, 1}, Sizes{1, 64, 64, 64}}}) {
    const Monarch m = arranged(*fuse(first, second), {});
    list.push_back(wide(m) ? wide_pack_instance() : fused_pack_instance(m));
    for (const DType dtype : {DType::f16, DType::bf16}) {
      list.push_back(wide(m) ? wide_instance(dtype) : fused_instance(m, dtype));
    }
  }
  return list;
}
const KernelList kKernels{"kronecker", list_kernels};

/// Rows of neighbouring features that begin at 16 bytes.
bool in_rows(const Matrix& m) {
  return m.feature == 1 && m.batch > 0 && m.batch % 8 == 0 && m.batch < std::int64_t{1} << 38 && is_aligned(m.data, 16);
}

/// In boxes of 16 rows × what a CTA takes of the features.
Map x_map(const Problem& problem, const Monarch& m) {
  const auto u64 = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const std::uint64_t sizes[] = {64, u64(problem.batch), u64(std::int64_t{m.q} * m.r / 64)};
  const std::uint64_t strides[] = {u64(problem.x.batch) * 2, 128};
  const std::uint32_t box[] = {64, Monarch::kRows, static_cast<std::uint32_t>(m.features() / 64)};
  return std::bit_cast<Map>(driver::make_tensor_map(problem.x.data, 2, sizes, strides, box, driver::Swizzle::b128));
}

/// In boxes of 16 l × half of the rows × all j.
Map y_map(const Problem& problem) {
  const auto u64 = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const std::uint64_t sizes[] = {64, u64(problem.batch), 64};
  const std::uint64_t strides[] = {u64(problem.y.batch) * 2, 128};
  const std::uint32_t box[] = {16, Wide::kRows / 2, 64};
  return std::bit_cast<Map>(driver::make_tensor_map(problem.y.data, 2, sizes, strides, box, driver::Swizzle::b32));
}

PackParams pack_params(const Problem& first, const Problem& second, void* to) {
  return {first.w.data, second.w.data, to, first.w.a, first.w.b, first.w.c, second.w.b, second.w.c, second.w.d};
}

void run_wide(const Problem& first, const Problem& second, const Monarch& m, Context& context) {
  const int device = context.device.index;
  const Workspace packed(context, static_cast<std::size_t>(Wide::kWords) * sizeof(std::uint32_t));
  const PackParams pack = pack_params(first, second, packed.data());
  get_kernel(wide_pack_instance(), device).launch(Wide::kWords / kPackThreads, kPackThreads, 0, &pack, context.stream);

  WideParams params{};
  params.x = x_map(first, m);
  params.y = y_map(second);
  params.weights = packed.data();
  params.bias = second.bias.data;
  params.batch = first.batch;
  params.bias_stride = second.bias.stride;
  params.activation = static_cast<int>(second.activation);
  const Kernel& kernel = get_kernel(wide_instance(first.dtype), device);
  const std::int64_t clusters = std::min<std::int64_t>(
      kernel.resident_clusters(Wide::kRanks, Wide::kThreads, Wide::kShared), ceil_div(first.batch, Wide::kRows));
  kernel.launch_clusters(clusters * Wide::kRanks, Wide::kRanks, Wide::kThreads, Wide::kShared, &params, context.stream,
                         true);
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

bool fits(const Problem& first, const Problem& second, const Machine& machine) {
  const bool type = first.dtype == DType::f16 || first.dtype == DType::bf16;
  return type && machine.arch == "sm_90a" && first.batch < kMost && in_rows(first.x) && in_rows(second.y) &&
         fuse(first.sizes, second.sizes).has_value();
}

void launch(const Problem& first, const Problem& second, Context& context, const Arrangement& arrangement) {
  const driver::DeviceScope scope(context.device.index);
  const bool free = arrangement.exchange == 0 && arrangement.first_warps == 0 && arrangement.second_warps == 0;
  const Monarch plain = *fuse(first.sizes, second.sizes);
  if (free && wide(plain)) {
    run_wide(first, second, plain, context);
    return;
  }
  const Monarch m = arranged(plain, arrangement);
  const int device = context.device.index;
  const Workspace packed(context, static_cast<std::size_t>(m.words()) * sizeof(std::uint32_t));
  const PackParams pack = pack_params(first, second, packed.data());
  get_kernel(fused_pack_instance(m), device)
      .launch(ceil_div(std::int64_t{m.words()}, kPackThreads), kPackThreads, 0, &pack, context.stream);

  FusedParams params{};
  params.x = x_map(first, m);
  params.weights = packed.data();
  params.y = second.y.data;
  params.bias = second.bias.data;
  params.batch = first.batch;
  params.y_stride = second.y.batch;
  params.bias_stride = second.bias.stride;
  params.activation = static_cast<int>(second.activation);
  const Kernel& kernel = get_kernel(fused_instance(m, first.dtype), device);
  const std::int64_t clusters = std::min<std::int64_t>(kernel.resident_clusters(m.ranks, m.threads(), m.shared()),
                                                       ceil_div(first.batch, Monarch::kRows));
  kernel.launch_clusters(clusters * m.ranks, m.ranks, m.threads(), m.shared(), &params, context.stream, true);
}

}  // namespace fretwork::kronecker::chain
