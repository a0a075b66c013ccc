// Names of the Hopper kernels of attention, and their table.
#include "ops/attention/cuda/hopper_kernels.h"

#include <utility>

#include "core/divide.h"
#include "ops/attention/cuda/hopper.h"
#include "ops/attention/cuda/params_hopper.cuh"

namespace fretwork::attention_op::hopper {
namespace {

KernelSpec instance(const std::string& file, const std::string& kernel, DType dtype, const std::string& rest) {
  return {"ops/attention/cuda/hopper_" + file + ".cuh",
          "fretwork::attention_op::hopper::" + kernel + "<" + device_type(dtype) + rest + ">"};
}
std::string flag(bool value) { return value ? ", true" : ", false"; }

KernelSpec forward_instance(DType dtype, const Columns& columns, const Extras& extras) {
  return instance("forward", "forward", dtype, columns.text() + extras.text());
}
KernelSpec backward_instance(DType dtype, const Columns& columns, Make make, const Extras& extras) {
  if (make == Make::values) {
    return instance("backward_deep", "backward_deep_values", dtype, columns.text() + extras.text());
  }
  if (columns.deep()) {
    return instance("backward_deep", "backward_deep", dtype, columns.text() + flag(make == Make::keys) + extras.text());
  }
  return instance("backward", make == Make::keys ? "backward_keys" : "backward_queries", dtype,
                  columns.text() + extras.text());
}
KernelSpec fill_instance(DType dtype) { return instance("forward", "fill", dtype, ""); }
KernelSpec statistics_instance(DType dtype) {
  return {"ops/attention/cuda/rows.cuh", std::string("fretwork::attention_stats<") + device_type(dtype) + ", 8>"};
}
KernelSpec join_instance(DType dtype) { return instance("join", "join", dtype, ""); }
/// Of kernels that make all gradients at once, for as many columns of q and k as of v.
KernelSpec whole_instance(DType dtype, const Columns& columns, Make make, bool masked, bool padded) {
  return make == Make::whole ? instance("backward_whole", "backward_whole", dtype,
                                        ", " + std::to_string(columns.most()) + flag(masked) + flag(padded))
                             : instance("backward_whole", "finish_whole", dtype, ", " + std::to_string(columns.most()));
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  const auto add = [&](KernelSpec kernel, int shared) {
    kernel.dynamic_shared = shared;
    list.push_back(std::move(kernel));
  };
  if (arch != "sm_90a") {
    return list;
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    list.push_back(fill_instance(dtype));
    list.push_back(statistics_instance(dtype));
    list.push_back(join_instance(dtype));
    for (const Columns& columns : {Columns{64, 64}, {128, 128}}) {
      for (const auto& [masked, padded] : {std::pair{false, false}, {true, false}, {true, true}}) {
        add(whole_instance(dtype, columns, Make::whole, masked, padded), whole_shared(columns.most()));
      }
      list.push_back(whole_instance(dtype, columns, Make::finish, false, false));
    }
    for (const Columns& columns : {Columns{64, 64}, {64, 128}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
      for (const Extras& extras : {Extras{false, false}, {false, true}, {true, false}, {true, true}}) {
        add(forward_instance(dtype, columns, extras), forward_shared(columns));
        for (const bool keys : {false, true}) {
          for (const Make make : backward_makes(columns, keys)) {
            add(backward_instance(dtype, columns, make, extras), backward_shared(columns));
          }
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"attention", list_kernels};

constinit KernelTable<774> kernels;

}  // namespace

std::string Columns::text() const { return ", " + std::to_string(depth) + ", " + std::to_string(values); }
std::string Extras::text() const { return flag(general) + flag(pieces); }
Columns columns_of(const Problem& p) {
  return {static_cast<int>(64 * ceil_div(p.depth, 64)), static_cast<int>(64 * ceil_div(p.value_depth, 64))};
}
std::vector<Make> backward_makes(const Columns& columns, bool keys) {
  return !keys            ? std::vector{Make::queries}
         : columns.deep() ? std::vector{Make::keys, Make::values}
                          : std::vector{Make::keys};
}

std::size_t Which::number() const {
  const unsigned within = (dtype == DType::f16 ? 0u : 1u) | unsigned{extras.general} << 1 |
                          unsigned{extras.pieces} << 2 | static_cast<unsigned>(columns.depth / 64 - 1) << 3 |
                          static_cast<unsigned>(columns.values / 64 - 1) << 5;
  constexpr unsigned kFill = 128 * static_cast<unsigned>(Make::fill);
  const auto at = static_cast<unsigned>(make);
  return (make < Make::fill ? 128 * at : kFill + 2 * (at - static_cast<unsigned>(Make::fill))) + within;
}
KernelSpec Which::spec() const {
  switch (make) {
    case Make::forward:
      return forward_instance(dtype, columns, extras);
    case Make::keys:
    case Make::queries:
    case Make::values:
      return backward_instance(dtype, columns, make, extras);
    case Make::fill:
      return fill_instance(dtype);
    case Make::whole:
    case Make::finish:
      return whole_instance(dtype, columns, make, extras.general, extras.pieces);
    case Make::join:
      return join_instance(dtype);
    case Make::statistics:
      break;
  }
  return statistics_instance(dtype);
}
const Kernel& Which::kernel(int device) const {
  return kernels.get(number(), device, [this] { return spec(); });
}
void prepare_kernels(std::span<const Which> wanted, int device) { kernels.prepare(wanted, device); }

int forward_shared(const Columns& columns) {
  const auto [cols, items, stages] = forward_tiles(columns.depth, columns.values);
  return 1024 + 2 * (items * kRows * columns.most() + stages * cols * (columns.depth + columns.values));
}
int backward_shared(const Columns& columns) {
  if (columns.deep()) {
    const auto [first, second] = deep_stages(columns.most(), false);
    return 1024 + 2 * columns.most() * (2 * kRows + (first + second) * kBackwardShape.cols);
  }
  return 1024 + 2 * columns.most() * (4 * kRows + 2 * (columns.most() == 64 ? 6 : 3) * kBackwardShape.cols);
}

}  // namespace fretwork::attention_op::hopper
