// Operands of 2:4 products as kernels receive them: in lines along k, or as a copy in such lines for the duration of a
// call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fretwork/context.h"
#include "fretwork/tensor.h"
#include "ops/two_four/cuda/params.h"

namespace fretwork::two_four {

OutType out_type(DType dtype);

/// What a copy is made of and into.
enum class Copy : std::size_t { bytes, halves, words, e4m3_to_f16, e5m2_to_f16, tf32, none };

/// The copy that only moves bits.
Copy plain_copy(DType dtype);

/// An operand as it is, or a copy whose lines begin at multiples of 16 bytes, with zeros behind their elements.
class Lines {
 public:
  Lines(Copy copy, const LinesArg& from, std::int64_t lines, std::int64_t count, std::int64_t batch, Context& context);
  const LinesArg& arg() const { return arg_; }

 private:
  LinesArg arg_;
  std::int64_t batches_, pitch_;
  Workspace space_;
};

}  // namespace fretwork::two_four
