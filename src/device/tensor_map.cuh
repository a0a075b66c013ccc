// A tensor map as host and device pass it in a kernel's parameters.
#pragma once

namespace fretwork {

struct alignas(64) Map {
  unsigned long long opaque[16];
};

}  // namespace fretwork
