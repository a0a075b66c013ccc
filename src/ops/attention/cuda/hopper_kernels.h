// The Hopper kernels of attention by name: which there are, and which one a launch takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "fretwork/tensor.h"
#include "ops/attention/problem.h"
#include "runtime/kernels.h"

namespace fretwork::attention_op::hopper {

inline constexpr int kMostColumns = 256;  ///< that registers have room for

enum class Make : unsigned { forward, keys, queries, values, whole, finish, fill, statistics, join };

/// Columns that kernels have, of q and k and of v: whole 64s. Beyond those of a problem they find zeros, and store
/// nothing.
struct Columns {
  int depth, values;

  int most() const { return std::max(depth, values); }
  /// Registers have no room for the gradients of keys and values at once.
  bool deep() const { return most() > 128; }
  std::string text() const;  ///< as template arguments
};
Columns columns_of(const Problem& p);

/// What a kernel need not have where no component asks for it: masks of bits and columns that nothing uses; items that
/// are pieces of tiles, and heads that share tiles.
struct Extras {
  bool general = false, pieces = false;

  std::string text() const;
};

/// What makes the gradients of keys and values, or of queries.
std::vector<Make> backward_makes(const Columns& columns, bool keys);

/// Which kernel; those from fill on have neither columns nor extras. Of `whole` ones extras say whether there are
/// masks, and padding.
struct Which {
  Make make;
  DType dtype;
  Columns columns{64, 64};
  Extras extras{};

  std::size_t number() const;
  KernelSpec spec() const;
  const Kernel& kernel(int device) const;
};

/// Has these kernels ready; those that are new are compiled at the same time.
void prepare_kernels(std::span<const Which> wanted, int device);

/// Bytes for what ForwardShared, BackwardShared and DeepShared describe.
int forward_shared(const Columns& columns);
int backward_shared(const Columns& columns);

}  // namespace fretwork::attention_op::hopper
