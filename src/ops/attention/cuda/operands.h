// What kernels read and write besides tensor maps: aligned operands, outputs, plans and heads on the device, key
// padding.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "core/divide.h"
#include "ops/attention/cuda/params.h"
#include "ops/attention/plan.h"
#include "ops/attention/problem.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::attention_op {

// ------------------------------------------------------------------------------------------------- operands

/// Sizes of an operand with a matrix for each (batch, head).
struct Sizes {
  std::int64_t batch, heads, rows, cols;
};

CopyParams copy_params(const void* from, const Operand& at, void* to, const Operand& to_at, const Sizes& s);
void run_copy(const CopyParams& params, DType from, DType to, Context& context);
void fill(const Operand& out, const Sizes& sizes, DType dtype, float value, Context& context);

/// Bytes of operands and results, each once; of a backward pass those of the gradients as well.
double operand_bytes(const Problem& problem);
double operand_bytes(const BackwardProblem& problem);
/// Of keys and values of which row tiles read so many, all together: those that are not read for the first time.
double reread_bytes(const Problem& problem, double keys);

/// Row after row, each `line` elements long.
Operand contiguous(void* data, const Sizes& s, std::int64_t line);

/// Whether kernels can read an operand as it is: 16 bytes at a time, and a row's bytes counted in 32 bits.
bool readable(const Operand& x, std::int64_t cols, DType dtype);

/// An operand as the kernels read it: itself, or an aligned copy for the length of a call.
class Input {
 public:
  Input(const Operand& of, const Sizes& sizes, DType dtype, Context& context)
      : line_(ceil_div(sizes.cols, chunk(dtype)) * chunk(dtype)),
        space_(context,
               readable(of, sizes.cols, dtype)
                   ? 0
                   : static_cast<std::size_t>(sizes.batch * sizes.heads * sizes.rows * line_) * size_of(dtype)) {
    Operand at = of;
    if (space_.data() != nullptr) {
      at = contiguous(space_.data(), sizes, line_);
      run_copy(copy_params(of.data, of, at.data, at, sizes), dtype, dtype, context);
    }
    arg_ = {at.data, at.batch, at.head, static_cast<int>(at.row * static_cast<std::int64_t>(size_of(dtype)))};
  }
  const InputArg& arg() const { return arg_; }

 private:
  static std::int64_t chunk(DType dtype) { return 16 / static_cast<std::int64_t>(size_of(dtype)); }
  std::int64_t line_;
  Workspace space_;
  InputArg arg_{};
};

/// `vector` is set where neighbours of a row can be written 16 bytes at a time.
OutputArg output_arg(const Operand& out, DType dtype);
/// For kernels that write elements one by one.
OutputArg output_arg(const Operand& out);

BiasType number_type(DType dtype);

/// Whether the portable kernels do more than a positive scale to scores, as all do in float. Then statistics are
/// ScoreStats.
bool scored(const Problem& problem);

/// What both families ask of a row's statistics; where those go is told by them.
StatsParams stats_params(const BackwardProblem& problem);
/// Statistics for the portable kernels: ScoreStats if `scored`, with the sums of rows with a large lse or null.
void launch_statistics(const BackwardProblem& problem, bool scored, void* stats, const RowSum* sums, Context& context);

// ---------------------------------------------------------------------------------------------------- sinks

SinksArg sinks_arg(const Problem& problem);
/// Has rows begin with their sinks alone: (top, sum) of each (batch, head, query), tops times `unit`, and lse unless it
/// is absent.
void begin_with_sinks(const Problem& problem, RowSum* sums, const Operand& lse, float unit, Context& context);
/// Of (top, sum) of all rows.
std::size_t sums_bytes(const Problem& problem);
/// What rows of the portable kernels have before their first component: nothing, or a sink. Of lse the latter alone.
void begin_sums(const Problem& problem, RowSum* sums, const Operand& lse, Context& context);
/// Adds up the terms of the gradient that statistics left, each head's in the order of batch elements and rows.
void add_up_sinks(const BackwardProblem& problem, Context& context);
/// Sums over the third dimension, in CTAs of so many warps, or by a thread each if they are short.
void add_up(const CopyParams& sum, DType to, int warps, Context& context);
inline constexpr int kSumWarps = 8, kLongSumWarps = 32;

// ---------------------------------------------------------------------------------------------- gradients

/// Where a gradient is made: in place, or in float where several launches add to it.
class Target {
 public:
  Target(const Operand& out, const Sizes& sizes, DType dtype, bool adds, bool zero_first, Context& context)
      : out_(out),
        sizes_(sizes),
        dtype_(dtype),
        context_(context),
        space_(context, out.data != nullptr && adds && dtype != DType::f32
                            ? static_cast<std::size_t>(sizes.batch * sizes.heads * sizes.rows * sizes.cols) * 4
                            : 0) {
    if (space_.data() != nullptr) {
      fretwork::cuda::fill_zero(space_.data(),
                                static_cast<std::size_t>(sizes.batch * sizes.heads * sizes.rows * sizes.cols) * 4,
                                context.stream);
    } else if (out.data != nullptr && (adds || zero_first)) {
      fill(out, sizes, dtype, 0.0f, context);
    }
  }
  OutputArg arg() const {
    return space_.data() != nullptr ? output_arg(contiguous(space_.data(), sizes_, sizes_.cols), DType::f32)
                                    : output_arg(out_, dtype_);
  }
  /// After the last launch.
  void finish() {
    if (space_.data() != nullptr) {
      run_copy(copy_params(space_.data(), contiguous(nullptr, sizes_, sizes_.cols), out_.data, out_, sizes_),
               DType::f32, dtype_, context_);
    }
  }

 private:
  Operand out_;
  Sizes sizes_;
  DType dtype_;
  Context& context_;
  Workspace space_;
};

// ------------------------------------------------------------------- plans and heads, for the portable kernels

struct DevicePlan {
  fretwork::cuda::DeviceBuffer memory;
  std::vector<ComponentArg> components;
  bool covers_rows = false;  ///< the first component has every row
  std::size_t bytes() const { return memory.bytes(); }
};

/// The plan of the pattern, or of its transpose, on the context's device. Remembered; kept for good while a graph is
/// captured.
std::shared_ptr<const DevicePlan> device_plan(const RegularPattern& pattern, const TileShape& shape, bool transposed,
                                              const Context& context);

/// Numbers on the context's device, remembered in the same way.
struct DeviceNumbers {
  fretwork::cuda::DeviceBuffer memory;
  std::size_t bytes() const { return memory.bytes(); }
  const int* data() const { return static_cast<const int*>(memory.data()); }
};
std::shared_ptr<const DeviceNumbers> device_numbers(std::span<const int> numbers, const Context& context);

/// Heads with the same pattern, of some batch elements.
struct PatternHeads : HeadSet<RegularPattern> {
  std::int64_t first_batch, batch;
};

std::vector<PatternHeads> heads_of(const Problem& p);

/// A set's heads on the device; with `by_key_head`, gathered under the key heads that they share.
struct DeviceHeads {
  HeadsArg arg{};
  std::shared_ptr<const DeviceNumbers> heads, groups;

  DeviceHeads(const Problem& p, const PatternHeads& set, bool by_key_head, Context& context);
};

// ---------------------------------------------------------------------------------------------- key padding

PaddingArg padding_arg(const Problem& problem);

/// Which columns of tiles are seen, for each batch element, as bits that take the place of a plan's `used` ones: tiles
/// without padding have none, and kernels go through them as if there were none anywhere.
class SeenColumns {
 public:
  /// `tiles` says which: order and tiles, or tokens and tile_used; used, side, tile_count. Launches the kernel that
  /// writes them.
  SeenColumns(const Problem& problem, SeenParams tiles, Context& context);
  /// Of each (batch, tile): the first of its words, or −1.
  const int* first() const { return static_cast<const int*>(memory_.data()); }
  const unsigned* words() const { return reinterpret_cast<const unsigned*>(first() + count_); }
  /// Of each batch element, group_count() words: a bit for each tile, 1 where some of its columns are seen.
  const unsigned* tile_words() const { return words() + count_ * side_words_; }
  int group_count() const { return static_cast<int>(groups_); }

 private:
  std::int64_t count_, side_words_, groups_;
  Workspace memory_;
};

/// After the gradients of keys and values are made: zeros for those that are not seen. Absent ones are left alone.
void clear_padding(const BackwardProblem& problem, Context& context);

}  // namespace fretwork::attention_op
