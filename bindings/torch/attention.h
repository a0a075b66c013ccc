// The options of attention's ops: as their schemas have them, and as the core does.
#pragma once

#include "call.h"

namespace fretwork_torch {

/// What stands together in every schema of attention, in its order.
struct AttentionArguments {
  explicit AttentionArguments(Arguments& arguments)
      : scale(arguments.optional_number()),
        bias(arguments.optional_tensor()),
        slopes(arguments.optional_tensor()),
        softcap(arguments.number()),
        dropout(arguments.number()),
        seed(arguments.optional_tensor()),
        precision(arguments.text()) {}

  fretwork::AttentionOptions options(const char* op, const Tensor& q, const std::optional<Tensor>& padding,
                                     const std::optional<Tensor>& sinks) const {
    fretwork::AttentionOptions made;
    made.bias = view(op, "bias", bias);
    made.slopes = view(op, "slopes", slopes);
    made.key_padding = view(op, "key_padding_mask", padding, {"bool"});
    made.sinks = view(op, "sinks", sinks);
    made.scale = scale;
    made.softcap = softcap;
    made.dropout = dropout;
    if (seed.has_value()) {
      const bool right =
          dtype_code(*seed) == aoti_torch_dtype_int64() && seed->numel() == 1 && device_of(*seed) == device_of(q);
      if (!right) {
        throw fretwork::Error(op, "seed", "one int64 on the device of q", "something else");
      }
      made.dropout_seed = static_cast<const std::int64_t*>(seed->const_data_ptr());
    }
    return made;
  }

  std::optional<double> scale;
  std::optional<Tensor> bias, slopes;
  double softcap, dropout;
  std::optional<Tensor> seed;
  Text precision;
};

}  // namespace fretwork_torch
