// What makes and undoes the plain form, on the CPU.
#include "fretwork/error.h"
#include "ops/two_four/problem.h"

namespace fretwork::two_four::cpu {

void compress(const Format&, std::int64_t*, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }
void check(const Format&, std::int64_t*, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }
void check_metadata(const Format&, std::int64_t*, Context&) {
  throw Error("two_four", "device", "a backend", "none yet");
}
void to_dense(const Format&, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }
void gather(const Format&, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }
void prune(const Format&, const Matrix&, bool, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }
void prune_both(const Format&, const Format&, Context&) { throw Error("two_four", "device", "a backend", "none yet"); }

}  // namespace fretwork::two_four::cpu
