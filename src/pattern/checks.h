// What ops ask of tensors in the same way; each throws an Error that names the op and the argument.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/error.h"
#include "fretwork/pattern.h"
#include "fretwork/tensor.h"

namespace fretwork {

void check_floating(const char* op, const char* argument, const ConstTensorView& tensor);
/// Threads and workspace are there.
void check_context(const char* op, const Context& context);
/// Memory of the context's device, and not null where there are elements.
void check_device(const char* op, const char* argument, const ConstTensorView& tensor, const Context& context);
void check_data(const char* op, const char* argument, const ConstTensorView& tensor);
/// The type, shape and device of `like`, which has passed its checks.
void check_same(const char* op, const char* argument, const ConstTensorView& tensor, const ConstTensorView& like,
                const Context& context);
/// Blocks packed in `layout`, with or without Z; gives the batch, 1 where there is no Z.
std::int64_t check_packed(const char* op, const char* argument, const ConstTensorView& tensor,
                          const BlockLayout& layout);

/// The pattern that a pointer of any family leads to.
template <typename Family>
const Family& check_pattern(const char* op, const char* argument, const std::shared_ptr<const Family>& pattern) {
  if (pattern == nullptr) {
    throw Error(op, argument, "a pattern", "none");
  }
  return *pattern;
}

/// A view's data as a backend's operand has it: one type serves what is read and what is written.
inline void* operand_data(const ConstTensorView& tensor) { return const_cast<void*>(tensor.data); }

/// A pattern of queries and keys as parts. What had to be converted is remembered, as an op asks at every call.
RegularPtr check_regular(const char* op, const PatternPtr& pattern);

/// The packed block of each (head, block row, block column), −1 where there is none.
std::vector<int> block_grid(const BlockLayout& layout);

}  // namespace fretwork
