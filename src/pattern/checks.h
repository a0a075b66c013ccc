// What ops ask of tensors in the same way; each throws an Error that names the op and the argument.
#pragma once

#include <cstdint>
#include <vector>

#include "fretwork/context.h"
#include "fretwork/pattern.h"
#include "fretwork/tensor.h"

namespace fretwork {

void check_floating(const char* op, const char* argument, const TensorView& tensor);
/// Threads and workspace are there.
void check_context(const char* op, const Context& context);
/// Memory of the context's device, and not null where there are elements.
void check_device(const char* op, const char* argument, const TensorView& tensor, const Context& context);
void check_data(const char* op, const char* argument, const TensorView& tensor);
/// Blocks packed in `layout`, with or without Z; gives the batch, 1 where there is no Z.
std::int64_t check_packed(const char* op, const char* argument, const TensorView& tensor, const BlockLayout& layout);

/// A pattern of queries and keys as parts. What had to be converted is remembered, as an op asks at every call.
std::shared_ptr<const RegularPattern> check_regular(const char* op, const PatternPtr& pattern);

/// The packed block of each (head, block row, block column), −1 where there is none.
std::vector<int> block_grid(const BlockLayout& layout);

}  // namespace fretwork
