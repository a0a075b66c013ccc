// Integer division that rounds up: tiles that cover a length.
#pragma once

#include <cstdint>

namespace fretwork {

constexpr std::int64_t ceil_div(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

}  // namespace fretwork
