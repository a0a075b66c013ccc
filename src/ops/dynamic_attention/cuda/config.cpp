// Which of attention's kernels runs on a walk.
#include "ops/dynamic_attention/cuda/config.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/attention/cuda/operands.h"
#include "runtime/cuda_driver.h"

namespace fretwork::dynamic_attention_op {

using attention_op::KernelShape;

constexpr const char* kSource = "ops/dynamic_attention/cuda/attention.cuh";

KernelShape Config::shape() const {
  return simple()                ? attention_op::simple_shape(depth, pass == Pass::forward ? 3 : 4, tf32)
         : pass == Pass::forward ? attention_op::forward_shape(depth, extras, rows)
                                 : attention_op::backward_shape(depth, extras, rows);
}

KernelSpec Config::spec() const {
  const std::string size = std::to_string(depth), space = ", fretwork::dynamic_attention_op::";
  const std::string kind = pass == Pass::forward ? "ForwardParams" : "BackwardParams";
  const std::string params =
      space + (walk == WalkType::gather ? "GatherParams" : (walk == WalkType::scatter ? "Scatter" : "") + kind);
  const bool forward = pass == Pass::forward;
  if (simple()) {
    const std::string begin = forward                   ? "fretwork::simple_forward<" + size
                              : pass == Pass::d_queries ? "fretwork::simple_backward<" + size + ", false"
                                                        : "fretwork::simple_backward<" + size + ", true";
    return {kSource, begin + (tf32 ? ", true" : ", false") + params + ">", shape().shared_bytes};
  }
  const std::string begin = std::string(device_type(dtype)) + ", " + size;
  const std::string end = (extras ? ", true" : ", false") + params + ", " + std::to_string(rows) + ">";
  const char* const which = forward                       ? ""
                            : pass == Pass::d_queries     ? ", false, true, false"
                            : pass == Pass::d_keys_values ? ", true, true, true"
                            : pass == Pass::d_keys        ? ", true, true, false"
                                                          : ", true, false, true";
  return {kSource, (forward ? "fretwork::attention_forward<" : "fretwork::attention_backward<") + begin + which + end,
          shape().shared_bytes};
}

KernelShape BiasKernel::shape() const { return attention_op::simple_shape(depth, 4); }

KernelSpec BiasKernel::spec() const {
  const auto flag = [](bool value) { return value ? ", true" : ", false"; };
  return {kSource,
          std::string("fretwork::bias_gradient<") + device_type(dtype) + ", " + std::to_string(depth) + flag(keys) +
              flag(row_sums) + ", fretwork::dynamic_attention_op::BiasGradientParams>",
          shape().shared_bytes};
}

namespace {

namespace driver = fretwork::cuda;

constexpr int kDepths[] = {32, 64, 96, 128, 192, 256};  // of 16-bit kernels
constexpr int kSimpleDepths[] = {64, 128, 256};
constexpr int kTables = 4096;  // more than a kernel's static shared memory

/// Rows of the kernels there are: few where a head dim is large or much is done to scores.
std::vector<int> row_choices(int depth, bool extras) {
  return extras ? std::vector{depth > 128 ? 64 : 128} : depth > 128 ? std::vector{64} : std::vector{32, 64, 128};
}

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const int depth : kSimpleDepths) {
    for (const bool tf32 : {false, true}) {
      for (const Pass pass : {Pass::forward, Pass::d_queries, Pass::d_keys_values}) {
        list.push_back(Config{pass, DType::f32, depth, 0, true, tf32}.spec());
        if (!tf32) {
          list.push_back(Config{pass, DType::f32, depth, 0, true, tf32, WalkType::scatter}.spec());
        }
      }
      list.push_back(Config{Pass::d_keys_values, DType::f32, depth, 0, true, tf32, WalkType::gather}.spec());
    }
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const auto& [keys, row_sums] : {std::pair{false, false}, {false, true}, {true, true}}) {
        list.push_back(BiasKernel{dtype, depth, keys, row_sums}.spec());
      }
    }
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int depth : kDepths) {
      for (const bool extras : {false, true}) {
        for (const int rows : row_choices(depth, extras)) {
          for (const WalkType walk : {WalkType::plain, WalkType::scatter, WalkType::gather}) {
            const auto add = [&](Pass pass) {
              list.push_back(Config{pass, dtype, depth, rows, extras, false, walk}.spec());
            };
            if (walk != WalkType::gather) {
              add(Pass::forward);
              add(Pass::d_queries);
            }
            if (depth <= 128) {
              add(Pass::d_keys_values);
            } else {
              add(Pass::d_keys);
              add(Pass::d_values);
            }
          }
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"dynamic_attention", list_kernels};

template <std::size_t N>
int depth_for(const int (&depths)[N], std::int64_t depth) {
  const int* const found = std::lower_bound(std::begin(depths), std::end(depths), depth);
  if (found == std::end(depths)) {
    throw Error("attention", "q", "head sizes up to " + std::to_string(depths[N - 1]), std::to_string(depth));
  }
  return *found;
}

}  // namespace

const Kernel& Config::kernel(int device) const {
  static KernelTable<5 * 3 * std::size(kDepths) * 3 * 2 * 2 * 3> table;
  const auto size = static_cast<std::size_t>(std::ranges::find(kDepths, depth) - std::begin(kDepths));
  std::size_t n = static_cast<std::size_t>(pass) * 3 + (dtype == DType::f32 ? 0 : dtype == DType::f16 ? 1 : 2);
  n = (n * std::size(kDepths) + size) * 3 + (rows == 32 ? 0 : rows == 64 ? 1 : 2);
  n = ((n * 2 + (extras ? 1 : 0)) * 2 + (tf32 ? 1 : 0)) * 3 + static_cast<std::size_t>(walk);
  return table.get(n, device, [&] { return spec(); });
}

int simple_depth(std::int64_t depth) { return depth_for(kSimpleDepths, depth); }

Config config_for(Pass pass, const attention_op::Problem& p, std::int64_t rows, const Context& context) {
  const std::int64_t deepest = std::max(p.depth, p.value_depth);
  const bool simple = p.dtype == DType::f32, extras = attention_op::scored(p);
  const int depth = simple ? depth_for(kSimpleDepths, deepest) : depth_for(kDepths, deepest);
  const std::vector<int> choices = row_choices(depth, extras);
  const auto found = std::ranges::find_if(choices, [&](int choice) { return choice >= rows; });
  Config config{pass,   p.dtype,
                depth,  found == choices.end() ? choices.back() : *found,
                extras, simple && context.precision == Precision::tf32};
  const int there = driver::device_info(context.device.index).shared_per_block;
  if (config.shape().shared_bytes > there - kTables) {
    config.tf32 = false;  // exact, which needs less
  }
  if (config.shape().shared_bytes > there) {
    throw Error("attention", "q",
                "a head size whose tiles fit the " + std::to_string(there) + " bytes of shared memory on this GPU",
                std::to_string(depth) + ", which needs " + std::to_string(config.shape().shared_bytes));
  }
  return config;
}

}  // namespace fretwork::dynamic_attention_op
