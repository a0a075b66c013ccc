// Types of results, and copies of operands to lines along k: kernels, workspace, launch.
#include "ops/two_four/cuda/operands.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <vector>

#include "core/divide.h"
#include "runtime/kernels.h"

namespace fretwork::two_four {
namespace {

constexpr std::int64_t kTile = 64, kThreads = 256;  // as the kernel has them
constexpr auto kCopies = static_cast<std::size_t>(Copy::none);
constexpr std::array<const char*, kCopies> kTypes = {
    "fretwork::u8, fretwork::u8",       "fretwork::u16, fretwork::u16",     "fretwork::u32, fretwork::u32",
    "fretwork::f8_e4m3, fretwork::f16", "fretwork::f8_e5m2, fretwork::f16", "float, fretwork::two_four::tf32_bits"};
constexpr std::array<std::int64_t, kCopies + 1> kBytes = {1, 2, 4, 2, 2, 4, 1};  // of an element of the copy

KernelSpec spec(std::size_t copy) {
  return {"ops/two_four/cuda/pack.cuh", std::string("fretwork::two_four::pack_lines<") + kTypes[copy] + ">"};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (std::size_t copy = 0; copy < kCopies; ++copy) {
    if (copy != static_cast<std::size_t>(Copy::tf32) || arch == "sm_90a") {
      list.push_back(spec(copy));
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};

constinit KernelTable<kCopies> kernels;

}  // namespace

OutType out_type(DType dtype) {
  constexpr DType kInOrder[] = {DType::f32, DType::f16,     DType::bf16,   DType::i32,
                                DType::i8,  DType::f8_e4m3, DType::f8_e5m2};  // of OutType
  return static_cast<OutType>(std::ranges::find(kInOrder, dtype) - std::begin(kInOrder));
}

Copy plain_copy(DType dtype) {
  return size_of(dtype) == 1 ? Copy::bytes : size_of(dtype) == 2 ? Copy::halves : Copy::words;
}

Lines::Lines(Copy copy, const LinesArg& from, std::int64_t lines, std::int64_t count, std::int64_t batch,
             Context& context)
    : arg_(from),
      batches_(from.batch == 0 ? 1 : batch),
      pitch_(ceil_div(count * kBytes[static_cast<std::size_t>(copy)], 16) * 16 /
             kBytes[static_cast<std::size_t>(copy)]),
      space_(context, copy == Copy::none ? 0
                                         : static_cast<std::size_t>(batches_ * lines * pitch_ *
                                                                    kBytes[static_cast<std::size_t>(copy)])) {
  if (copy == Copy::none) {
    return;
  }
  const PackLinesParams params{
      from, space_.data(), lines, count, pitch_, ceil_div(lines, kTile), ceil_div(pitch_, kTile)};
  const auto which = static_cast<std::size_t>(copy);
  kernels.get(which, context.device.index, [&] { return spec(which); })
      .launch(params.line_tiles * params.count_tiles * batches_, kThreads, 0, &params, context.stream);
  arg_ = {space_.data(), pitch_, 1, batches_ > 1 ? lines * pitch_ : 0};
}

}  // namespace fretwork::two_four
