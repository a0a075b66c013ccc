// Host side of the two general kernels. portable runs on the sparse tensor cores of sm_80 and later, after operands
// that do not lie in lines of 16-byte chunks were copied. generic takes everything.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/choose.h"
#include "ops/two_four/cuda/operands.h"
#include "runtime/alignment.h"
#include "runtime/kernels.h"

namespace fretwork::two_four {
namespace {

constexpr std::int64_t kRows = 128, kStageBytes = 128, kPackThreads = 256;  // as the kernels have them
constexpr std::int64_t kGenericCols = 64, kBand = 16;
constexpr std::array kTypes = {DType::f32, DType::f16,     DType::bf16,   DType::i8,
                               DType::u8,  DType::f8_e4m3, DType::f8_e5m2};

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

/// Room for a tile of sums and what the rows and columns of c have, in bytes.
constexpr std::int64_t sum_tile_bytes(std::int64_t cols) {
  return 4 * (std::max(kRows * (cols + 8), cols * (kRows + 4)) + 2 * kRows + cols);
}

// ---------------------------------------------------------------------------------------------------- kernels

/// What the portable kernel multiplies in: its type, tf32x3's three products, and how b lies.
struct Instance {
  DType dtype = DType::f16;
  int products = 1;
  bool b_along_k = true;
  int stages = 3;

  /// For a GPU whose CTAs may have so much shared memory: two CTAs to an SM come before a fourth stage.
  Instance(DType type, int count, bool along_k, std::int64_t shared)
      : dtype(type), products(count), b_along_k(along_k) {
    stages = 2 * (4 * stage_bytes() + 1024) <= shared + 1024 ? 4 : 3;
  }
  std::int64_t cols() const { return products == 3 ? 64 : 128; }
  std::int64_t depth() const { return kStageBytes / bytes_of(dtype); }
  /// Metadata of a row in a stage.
  std::int64_t metadata_bytes() const { return bytes_of(dtype) == 1 ? 16 : 8; }
  std::int64_t stage_bytes() const { return kRows * (kStageBytes / 2 + metadata_bytes()) + cols() * kStageBytes; }
  std::int64_t shared_bytes() const { return std::max(stages * stage_bytes(), sum_tile_bytes(cols())); }
  KernelSpec spec() const {
    return {"ops/two_four/cuda/portable.cuh",
            std::string("fretwork::two_four::portable::product<") + device_type(dtype) + ", " +
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

KernelSpec generic_spec(DType dtype) {
  return {"ops/two_four/cuda/generic.cuh",
          std::string("fretwork::two_four::generic::product<") + device_type(dtype) + ">",
          static_cast<int>(sum_tile_bytes(kGenericCols))};
}
KernelSpec metadata_spec() {
  return {"ops/two_four/cuda/pack.cuh", "fretwork::two_four::pack_metadata<" + std::to_string(kPackThreads) + ">"};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  const std::int64_t shared = (arch.starts_with("sm_9") || arch.starts_with("sm_10") ? 227
                               : arch == "sm_80"                                     ? 163
                                                                                     : 99) *
                              1024;
  std::vector<KernelSpec> list = {metadata_spec()};
  for (const bool along_k : {false, true}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      list.push_back(Instance{dtype, 1, along_k, shared}.spec());
    }
    list.push_back(Instance{DType::f32, 3, along_k, shared}.spec());
  }
  for (const DType dtype : {DType::i8, DType::u8, DType::f8_e4m3, DType::f8_e5m2}) {
    if (!is_fp8(dtype) || has_fp8_mma_sp(arch)) {
      list.push_back(Instance{dtype, 1, true, shared}.spec());
    }
  }
  std::ranges::transform(kTypes, std::back_inserter(list), generic_spec);
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
  Metadata(bool copy, const Problem& p, const Instance& instance, Context& context)
      : arg_(metadata_arg(p)),
        pitch_(ceil_div(p.k, instance.depth()) * instance.metadata_bytes()),
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

bool in_stages(const Problem& p, const Instance& instance) {
  const MetadataArg words = metadata_arg(p);
  return words.along == p.word_bytes && p.k % instance.depth() == 0 &&
         is_aligned(words.data, {words.line}, 1, instance.metadata_bytes());
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

Instance instance_of(const Problem& p, const Machine& machine) {
  const bool convert = is_fp8(p.dtype) && !machine.fp8_mma_sp;  // to f16, which holds it exactly
  const LinesArg b = b_arg(p);
  const std::int64_t size = bytes_of(p.dtype);
  const bool along_k = size == 1 || !in_chunks_across(b, p.n, size) || in_chunks(b, p.k, size);
  return {convert ? DType::f16 : p.dtype, p.dtype == DType::f32 && machine.precision == Precision::tf32x3 ? 3 : 1,
          along_k, machine.shared_bytes};
}

/// The operands that portable needs a copy of.
struct Copies {
  bool values = false, b = false, words = false;

  Copies(const Problem& p, const Instance& instance) {
    const std::int64_t size = bytes_of(instance.dtype);
    const bool convert = instance.dtype != p.dtype, any = p.k > 0;
    values = any && (convert || !in_chunks(values_arg(p), p.k / 2, size));
    b = any && instance.b_along_k && (convert || !in_chunks(b_arg(p), p.k, size));
    words = any && !in_stages(p, instance);
  }
  int count() const { return (values ? 1 : 0) + (b ? 1 : 0) + (words ? 1 : 0); }
};

/// Not products so small that copying an operand takes longer than the generic kernel.
bool portable_fits(const Problem& p, const Machine& machine) {
  constexpr std::int64_t kSmall = 1 << 18;
  return machine.arch >= 80 && (p.dtype != DType::f32 || machine.precision != Precision::ieee) &&
         (Copies(p, instance_of(p, machine)).count() == 0 || p.m * p.n * p.batch > kSmall / p.k);
}

/// A step of 128 bytes of the depth takes 0.9 µs where an SM has one CTA, and as long for two: 512² to 14336 × 4096
/// with 128 columns. Each copy reads and writes an operand.
void list_portable(const Problem& p, const Machine& machine, std::vector<Candidate>& list) {
  constexpr double kStep = 0.9, kTile = 4.0, kFirstBytes = 0.9, kCopy = 8.0;
  const Instance instance = instance_of(p, machine);
  const std::int64_t tiles = ceil_div(p.m, kRows) * ceil_div(p.n, instance.cols()) * p.batch;
  const auto waves = static_cast<double>(ceil_div(tiles, 2 * machine.multiprocessors));
  const auto steps = static_cast<double>(ceil_div(p.k, instance.depth()));
  const int copies = Copies(p, instance).count();
  const cost::Work work{.memory = sparse_bytes(p) / cost::kMemory,
                        .busiest = waves * (steps * kStep + kTile),
                        .serial = kFirstBytes + copies * (kCopy + sparse_bytes(p) / cost::kMemory)};
  list.push_back({{.family = &kPortable}, work.microseconds()});
}

void launch_portable(const Problem& problem, const Config& /*config*/, const Machine& machine, Context& context) {
  static KernelTable<Instance::kCount>& kernels = *std::make_unique<KernelTable<Instance::kCount>>().release();
  const Instance instance = instance_of(problem, machine);
  const Copies copies(problem, instance);
  const Copy copy = instance.dtype != problem.dtype ? to_f16(problem.dtype) : plain_copy(problem.dtype);
  const Lines values(copies.values ? copy : Copy::none, values_arg(problem), problem.m, problem.k / 2, 1, context);
  const Lines b(copies.b ? copy : Copy::none, b_arg(problem), problem.n, problem.k, problem.batch, context);
  const Metadata words(copies.words, problem, instance, context);
  ProductParams p = params_of(problem, instance.cols());
  p.values = values.arg();
  p.b = b.arg();
  p.words = words.arg();
  kernels.get(instance.number(), context.device.index, [&] { return instance.spec(); })
      .launch(p.row_tiles * p.col_tiles * problem.batch, 128, static_cast<int>(instance.shared_bytes()), &p,
              context.stream);
}

bool generic_fits(const Problem& /*problem*/, const Machine& /*machine*/) { return true; }

/// 16 groups of the depth take 7.5 µs, as long for the three CTAs that an SM has: 1024² and 4096² with 1 to 4096
/// columns, fp32.
void list_generic(const Problem& p, const Machine& machine, std::vector<Candidate>& list) {
  constexpr double kStep = 7.5, kFirstBytes = 0.9;
  const std::int64_t tiles = ceil_div(p.m, kRows) * ceil_div(p.n, kGenericCols) * p.batch;
  const auto waves = static_cast<double>(ceil_div(tiles, 3 * machine.multiprocessors));
  const cost::Work work{.memory = sparse_bytes(p) / cost::kMemory,
                        .busiest = waves * static_cast<double>(ceil_div(p.k, 16 * group(p.dtype))) * kStep,
                        .serial = kFirstBytes};
  list.push_back({{.family = &kGeneric}, work.microseconds()});
}

void launch_generic(const Problem& problem, const Config& /*config*/, const Machine& /*machine*/, Context& context) {
  static KernelTable<kTypes.size()>& kernels = *std::make_unique<KernelTable<kTypes.size()>>().release();
  ProductParams p = params_of(problem, kGenericCols);
  p.values = values_arg(problem);
  p.b = b_arg(problem);
  p.words = metadata_arg(problem);
  const auto number = static_cast<std::size_t>(std::ranges::find(kTypes, problem.dtype) - kTypes.begin());
  kernels.get(number, context.device.index, [&] { return generic_spec(problem.dtype); })
      .launch(p.row_tiles * p.col_tiles * problem.batch, 128, static_cast<int>(sum_tile_bytes(kGenericCols)), &p,
              context.stream);
}

}  // namespace

const KernelFamily kPortable{"portable", portable_fits, list_portable, launch_portable};
const KernelFamily kGeneric{"generic", generic_fits, list_generic, launch_generic};

}  // namespace fretwork::two_four
