// What ops ask of tensors in the same way.
#include "pattern/checks.h"

#include <list>
#include <mutex>
#include <string>

#include "fretwork/error.h"
#include "pattern/regular.h"

namespace fretwork {

void check_floating(const char* op, const char* argument, const ConstTensorView& tensor) {
  if (!is_floating(tensor.dtype)) {
    throw Error(op, argument, "float64, float32, float16 or bfloat16", name_of(tensor.dtype));
  }
}

void check_context(const char* op, const Context& context) {
  if (context.executor == nullptr || context.allocator == nullptr) {
    throw Error(op, context.executor == nullptr ? "context.executor" : "context.allocator", "an address", "null");
  }
}

void check_device(const char* op, const char* argument, const ConstTensorView& tensor, const Context& context) {
  check_context(op, context);
  if (tensor.device != context.device) {
    throw Error(op, argument, "a tensor on " + name_of(context.device), "one on " + name_of(tensor.device));
  }
  check_data(op, argument, tensor);
}

void check_data(const char* op, const char* argument, const ConstTensorView& tensor) {
  if (tensor.data == nullptr && tensor.elements() != 0) {
    throw Error(op, argument, "the address of " + shape_text(tensor.shape()), "null");
  }
}

void check_same(const char* op, const char* argument, const ConstTensorView& tensor, const ConstTensorView& like,
                const Context& context) {
  if (tensor.dtype != like.dtype) {
    throw Error(op, argument, name_of(like.dtype), name_of(tensor.dtype));
  }
  if (shape_text(tensor.shape()) != shape_text(like.shape())) {
    throw Error(op, argument, "shape " + shape_text(like.shape()), shape_text(tensor.shape()));
  }
  check_device(op, argument, tensor, context);
}

std::int64_t check_packed(const char* op, const char* argument, const ConstTensorView& tensor,
                          const BlockLayout& layout) {
  const auto& s = layout.sizes();
  const bool right = (tensor.rank == 3 || tensor.rank == 4) && tensor.size(-3) == layout.nnz() &&
                     tensor.size(-2) == s.block_rows && tensor.size(-1) == s.block_cols;
  if (!right) {
    const std::string blocks = shape_text(std::vector{layout.nnz(), s.block_rows, s.block_cols});
    throw Error(op, argument, "packed blocks " + blocks + " or (Z, " + blocks.substr(1), shape_text(tensor.shape()));
  }
  return tensor.size(-4);
}

RegularPtr check_regular(const char* op, const PatternPtr& pattern) {
  if (auto regular = std::dynamic_pointer_cast<const RegularPattern>(pattern)) {
    return regular;
  }
  constexpr const char* kExpected = "a regular pattern, a block layout of one head or a Kronecker pattern";
  if (pattern == nullptr) {
    throw Error(op, "pattern", kExpected, "none");
  }
  constexpr std::size_t kRemembered = 32;
  static std::mutex mutex;
  static std::list<std::pair<std::string, RegularPtr>> recent;
  const std::lock_guard lock(mutex);
  for (const auto& [text, converted] : recent) {
    if (text == pattern->text()) {
      return converted;
    }
  }
  try {
    recent.emplace_front(pattern->text(), as_regular(op, pattern));
  } catch (const Error&) {
    throw Error(op, "pattern", kExpected, pattern->text());
  }
  if (recent.size() > kRemembered) {
    recent.pop_back();
  }
  return recent.front().second;
}

std::vector<int> block_grid(const BlockLayout& layout) {
  const auto& s = layout.sizes();
  std::vector<int> grid(static_cast<std::size_t>(s.heads * s.rows * s.cols), -1);
  for (std::int64_t l = 0; l < s.heads * s.rows; ++l) {
    for (const auto& entry : layout.by_row().line(l)) {
      grid[static_cast<std::size_t>(l * s.cols + entry.other)] = static_cast<int>(entry.block);
    }
  }
  return grid;
}

}  // namespace fretwork
