// The types of the result and the bias of a 2:4 product, as kernels receive them; shared by host and device.
#pragma once

namespace fretwork::two_four {

enum class OutType : int { f32, f16, bf16, i32, i8, f8_e4m3, f8_e5m2 };

}  // namespace fretwork::two_four
