// The problem that backends receive for pack and unpack, after all checks.
#pragma once

#include <cstdint>

#include "fretwork/context.h"
#include "fretwork/pattern.h"

namespace fretwork::block_pack_op {

/// Strides in elements.
struct Problem {
  const BlockLayout* layout = nullptr;
  std::int64_t batch = 0;
  int element_bytes = 0;
  bool unpack = false;
  std::uint64_t fill = 0;  ///< the bits of one element, for unpack
  struct {
    void* data;
    std::int64_t z, h, row, col;
  } dense{};
  struct {
    void* data;
    std::int64_t z, block, row, col;
  } values{};
};

namespace cpu {
void run(const Problem& problem, Context& context);
}
namespace cuda {
void run(const Problem& problem, Context& context);
}

}  // namespace fretwork::block_pack_op
