// Launches the copies between weights and dense matrices on a GPU.
#include "ops/kronecker/convert.h"

#include <limits>
#include <string>
#include <vector>

#include "ops/kronecker/cuda/params_convert.cuh"
#include "runtime/kernels.h"

namespace fretwork::kronecker::cuda {
namespace {

constexpr const char* kSource = "ops/kronecker/cuda/convert.cuh";

KernelSpec begin_spec() { return {kSource, "fretwork::kronecker_convert_begin"}; }

KernelSpec spec(bool to_dense, int bytes, bool small) {
  const char* const bits = bytes == 2 ? "fretwork::u16" : bytes == 4 ? "fretwork::u32" : "fretwork::u64";
  return {kSource, std::string("fretwork::kronecker_convert<") + bits +
                       (small ? ", fretwork::u32" : ", fretwork::i64") + (to_dense ? ", true>" : ", false>")};
}

KroneckerConvertParams params(const ConvertProblem& p) {
  const auto& s = p.sizes;
  KroneckerConvertParams q{};
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

std::vector<KernelSpec> list(const std::string& /*arch*/) {
  std::vector<KernelSpec> specs = {begin_spec()};
  for (const bool to_dense : {false, true}) {
    for (const int bytes : {2, 4, 8}) {
      for (const bool small : {false, true}) {
        specs.push_back(spec(to_dense, bytes, small));
      }
    }
  }
  return specs;
}

const KernelList kernels("kronecker", list, kLeastArch);

}  // namespace

void convert(const ConvertProblem& problem, Context& context) {
  constexpr std::int64_t kPerBlock = kConvertThreads * kConvertElements;
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const KroneckerConvertParams p = params(problem);
  const bool small = p.total <= std::numeric_limits<std::uint32_t>::max();
  if (!problem.to_dense) {
    get_kernel(begin_spec(), context.device.index).launch(1, 1, 0, &p, context.stream);
  }
  const Kernel& kernel = get_kernel(spec(problem.to_dense, problem.element_bytes, small), context.device.index);
  kernel.launch((p.total + kPerBlock - 1) / kPerBlock, kConvertThreads, 0, &p, context.stream);
}

}  // namespace fretwork::kronecker::cuda
