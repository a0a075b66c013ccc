// 2:4 products on a GPU: asks the kernels in turn, and launches the last two itself. The portable kernel runs on the
// sparse tensor cores, after operands that do not lie in lines of 16-byte chunks were copied. The simple kernel takes
// the rest.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/cuda/lines.h"
#include "ops/two_four/cuda/params.h"
#include "ops/two_four/problem.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::two_four {
namespace {

namespace driver = fretwork::cuda;

constexpr const char* kPack = "ops/two_four/cuda/pack.cuh";
constexpr const char* kPortable = "ops/two_four/cuda/portable.cuh";
constexpr const char* kSimple = "ops/two_four/cuda/simple.cuh";
constexpr std::int64_t kRows = 128, kStageBytes = 128, kPackThreads = 256;  // as the kernels have them
constexpr std::int64_t kSimpleCols = 64, kBand = 16;
constexpr std::array kTypes = {DType::f32, DType::f16,     DType::bf16,   DType::i8,
                               DType::u8,  DType::f8_e4m3, DType::f8_e5m2};
/// Products so small that copying an operand takes longer than the simple kernel.
constexpr std::int64_t kSmall = 1 << 18;

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

/// Room for a tile of sums and what the rows and columns of c have, in bytes.
constexpr std::int64_t sum_tile_bytes(std::int64_t cols) {
  return 4 * (std::max(kRows * (cols + 8), cols * (kRows + 4)) + 2 * kRows + cols);
}

// ---------------------------------------------------------------------------------------------------- kernels

/// What the portable kernel multiplies in: its type, tf32x3's three products, and how b lies.
struct Variant {
  DType dtype = DType::f16;
  int products = 1;
  bool b_along_k = true;
  int stages = 3;

  /// For a GPU whose CTAs may have so much shared memory: two CTAs to an SM come before a fourth stage.
  Variant(DType type, int count, bool along_k, std::int64_t shared) : dtype(type), products(count), b_along_k(along_k) {
    stages = 2 * (4 * stage_bytes() + 1024) <= shared + 1024 ? 4 : 3;
  }
  std::int64_t cols() const { return products == 3 ? 64 : 128; }
  std::int64_t depth() const { return kStageBytes / bytes_of(dtype); }
  /// Metadata of a row in a stage.
  std::int64_t metadata_bytes() const { return bytes_of(dtype) == 1 ? 16 : 8; }
  std::int64_t stage_bytes() const { return kRows * (kStageBytes / 2 + metadata_bytes()) + cols() * kStageBytes; }
  std::int64_t shared_bytes() const { return std::max(stages * stage_bytes(), sum_tile_bytes(cols())); }
  KernelSpec spec() const {
    return {kPortable,
            std::string("fretwork::two_four::product_portable<") + device_type(dtype) + ", " +
                std::to_string(products) + (b_along_k ? ", true, " : ", false, ") + std::to_string(stages) + ">",
            static_cast<int>(shared_bytes())};
  }
  static constexpr std::size_t kCount = (kTypes.size() + 1) * 2 * 2;
  std::size_t number() const {
    const auto found = static_cast<std::size_t>(std::ranges::find(kTypes, dtype) - kTypes.begin());
    const std::size_t type = products == 3 ? kTypes.size() : found;
    return (type * 2 + (b_along_k ? 1 : 0)) * 2 + (stages == 4 ? 1 : 0);
  }
};

KernelSpec simple_spec(DType dtype) {
  return {kSimple, std::string("fretwork::two_four::product_simple<") + device_type(dtype) + ">",
          static_cast<int>(sum_tile_bytes(kSimpleCols))};
}
KernelSpec metadata_spec() {
  return {kPack, "fretwork::two_four::pack_metadata<" + std::to_string(kPackThreads) + ">"};
}

/// Whether fp8 is multiplied as it is: sm_89 and sm_12x have mma.sp for it. sm_80 has no fp8, and for sm_90 to sm_11x
/// ptxas converts operands before each mma.sp, which takes the registers that sums need. There fp8 is converted once,
/// to f16, which holds it exactly.
bool multiplies_fp8(const std::string& arch) {
  int number = 0;
  const std::size_t digits = std::min(arch.find_first_of("0123456789"), arch.size());
  std::from_chars(arch.data() + digits, arch.data() + arch.size(), number);
  return number == 89 || number >= 120;
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  const std::int64_t shared = (arch.starts_with("sm_9") || arch.starts_with("sm_10") ? 227
                               : arch == "sm_80"                                     ? 163
                                                                                     : 99) *
                              1024;
  std::vector<KernelSpec> list = {metadata_spec()};
  for (const bool along_k : {false, true}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      list.push_back(Variant{dtype, 1, along_k, shared}.spec());
    }
    list.push_back(Variant{DType::f32, 3, along_k, shared}.spec());
  }
  for (const DType dtype : {DType::i8, DType::u8, DType::f8_e4m3, DType::f8_e5m2}) {
    if (!is_fp8(dtype) || multiplies_fp8(arch)) {
      list.push_back(Variant{dtype, 1, true, shared}.spec());
    }
  }
  std::ranges::transform(kTypes, std::back_inserter(list), simple_spec);
  return list;
}
const KernelList kKernels{"two_four", list_kernels};

// --------------------------------------------------------------------------------------------------- operands

/// Strides of dimensions of size 1 are set to 0.
LinesArg values_arg(const Problem& p) {
  return {p.values.data, p.m > 1 ? p.values.line : 0, p.k > 2 ? p.values.along : 1, 0};
}
LinesArg b_arg(const Problem& p) {
  return {p.b.data, p.n > 1 ? p.b.col : 0, p.k > 1 ? p.b.row : 1, p.batch > 1 ? p.b.batch : 0};
}
MetadataArg metadata_arg(const Problem& p) {
  const bool one = p.k / two_four::group(p.dtype) <= 2 * p.word_bytes;
  return {p.words.data, p.m > 1 ? p.words.line * p.word_bytes : 0, one ? p.word_bytes : p.words.along * p.word_bytes,
          p.word_bytes / 2};
}

/// Whether `count` elements of each line, `size` bytes each, are whole chunks of 16 bytes.
bool in_chunks(const LinesArg& lines, std::int64_t count, std::int64_t size) {
  return lines.along == 1 && count * size % 16 == 0 && is_aligned(lines.data, {lines.line, lines.batch}, size, 16);
}
/// The same across the lines: their elements of one position are neighbours.
bool in_chunks_across(const LinesArg& lines, std::int64_t count, std::int64_t size) {
  return in_chunks({lines.data, lines.along, lines.line, lines.batch}, count, size);
}

Copy to_f16(DType dtype) { return dtype == DType::f8_e4m3 ? Copy::e4m3_to_f16 : Copy::e5m2_to_f16; }

/// Metadata as whole stages of bytes: as it is, or a copy with valid nibbles behind the last group.
class Metadata {
 public:
  Metadata(bool copy, const Problem& p, const Variant& variant, Context& context)
      : arg_(metadata_arg(p)),
        pitch_(ceil_div(p.k, variant.depth()) * variant.metadata_bytes()),
        space_(context, copy ? static_cast<std::size_t>(p.m * pitch_) : 0) {
    if (copy) {
      const PackMetadataParams params{arg_, space_.data(), p.m, p.k / two_four::group(p.dtype), pitch_};
      get_kernel(metadata_spec(), context.device.index)
          .launch(std::min<std::int64_t>(ceil_div(p.m * pitch_ / 4, kPackThreads), 1 << 16), kPackThreads, 0, &params,
                  context.stream);
      arg_ = {space_.data(), pitch_, 1, 0};
    }
  }
  const MetadataArg& arg() const { return arg_; }

 private:
  MetadataArg arg_;
  std::int64_t pitch_;
  Workspace space_;
};

bool in_stages(const Problem& p, const Variant& variant) {
  const MetadataArg words = metadata_arg(p);
  return words.along == p.word_bytes && p.k % variant.depth() == 0 &&
         is_aligned(words.data, {words.line}, 1, variant.metadata_bytes());
}

// ---------------------------------------------------------------------------------------------------- launches

/// All but the operands, for tiles of kRows × cols.
ProductParams params_of(const Problem& problem, std::int64_t cols) {
  ProductParams p{};
  p.c = problem.c.data;
  p.c_row = problem.m > 1 ? problem.c.row : 0;
  p.c_col = problem.n > 1 ? problem.c.col : 0;
  p.c_batch = problem.batch > 1 ? problem.c.batch : 0;
  p.bias = {problem.bias.data, problem.bias.stride};
  p.scale_s = {problem.scale_s.data, problem.scale_s.stride};
  p.scale_b = {problem.scale_b.data, problem.scale_b.stride};
  p.m = problem.m;
  p.n = problem.n;
  p.k = problem.k;
  p.row_tiles = ceil_div(p.m, kRows);
  p.col_tiles = ceil_div(p.n, cols);
  p.band = kBand;
  p.scale_out = problem.scale_out;
  p.out = out_type(problem.out);
  p.bias_type = out_type(problem.bias_dtype());
  p.activation = static_cast<int>(problem.activation);
  p.c_by_row = p.n > 1 && (p.m == 1 || std::abs(p.c_col) <= std::abs(p.c_row));
  const std::int64_t size = bytes_of(problem.out), near = p.c_by_row ? p.c_col : p.c_row;
  p.c_vector = near == 1 && is_aligned(p.c, {p.c_by_row ? p.c_row : p.c_col, p.c_batch}, size, 16);
  return p;
}

bool tensor_cores(const Problem& problem, const Context& context) {
  return driver::device_info(context.device.index).arch >= 80 &&
         (problem.dtype != DType::f32 || context.precision != Precision::ieee);
}

void run_simple(const Problem& problem, Context& context) {
  static KernelTable<kTypes.size()>& kernels = *std::make_unique<KernelTable<kTypes.size()>>().release();
  ProductParams p = params_of(problem, kSimpleCols);
  p.values = values_arg(problem);
  p.b = b_arg(problem);
  p.words = metadata_arg(problem);
  const auto which = static_cast<std::size_t>(std::ranges::find(kTypes, problem.dtype) - kTypes.begin());
  kernels.get(which, context.device.index, [&] { return simple_spec(problem.dtype); })
      .launch(p.row_tiles * p.col_tiles * problem.batch, 128, static_cast<int>(sum_tile_bytes(kSimpleCols)), &p,
              context.stream);
}

Variant variant_of(const Problem& problem, const Context& context) {
  const bool convert = is_fp8(problem.dtype) && !multiplies_fp8(driver::kernel_arch(context.device.index)),
             bytes = bytes_of(problem.dtype) == 1;
  const LinesArg b = b_arg(problem);
  const std::int64_t size = bytes_of(problem.dtype);
  const bool along_k = bytes || !in_chunks_across(b, problem.n, size) || in_chunks(b, problem.k, size);
  return {convert ? DType::f16 : problem.dtype,
          problem.dtype == DType::f32 && context.precision == Precision::tf32x3 ? 3 : 1, along_k,
          driver::device_info(context.device.index).shared_per_block};
}

/// False where copies would take longer than the simple kernel.
bool run_tensor_cores(const Problem& problem, Context& context) {
  static KernelTable<Variant::kCount>& kernels = *std::make_unique<KernelTable<Variant::kCount>>().release();
  const Variant variant = variant_of(problem, context);
  const std::int64_t size = bytes_of(variant.dtype), kept = problem.k / 2;
  const bool convert = variant.dtype != problem.dtype, any = problem.k > 0;
  const bool pack_values = any && (convert || !in_chunks(values_arg(problem), kept, size));
  const bool pack_b = any && variant.b_along_k && (convert || !in_chunks(b_arg(problem), problem.k, size));
  const bool pack_words = any && !in_stages(problem, variant);
  if ((pack_values || pack_b || pack_words) && problem.m * problem.n * problem.batch <= kSmall / problem.k) {
    return false;
  }
  const Copy copy = convert ? to_f16(problem.dtype) : plain_copy(problem.dtype);
  const Lines values(pack_values ? copy : Copy::none, values_arg(problem), problem.m, kept, 1, context);
  const Lines b(pack_b ? copy : Copy::none, b_arg(problem), problem.n, problem.k, problem.batch, context);
  const Metadata words(pack_words, problem, variant, context);
  ProductParams p = params_of(problem, variant.cols());
  p.values = values.arg();
  p.b = b.arg();
  p.words = words.arg();
  kernels.get(variant.number(), context.device.index, [&] { return variant.spec(); })
      .launch(p.row_tiles * p.col_tiles * problem.batch, 128, static_cast<int>(variant.shared_bytes()), &p,
              context.stream);
  return true;
}

}  // namespace

void cuda::run_portable(const Problem& problem, Context& context) {
  if (!tensor_cores(problem, context) || !run_tensor_cores(problem, context)) {
    run_simple(problem, context);
  }
}

void cuda::run(const Problem& problem, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  // From here on wgmma is quicker, and it alone reads b along n as it lies.
  const bool few = problem.n * problem.batch <= 32 && problem.b.row == 1;
  if (!(run_direct(problem, context) || run_narrow(problem, context) ||
        (few ? run_few(problem, context) || run_hopper(problem, context)
             : run_hopper(problem, context) || run_few(problem, context)))) {
    run_portable(problem, context);
  }
}

}  // namespace fretwork::two_four
