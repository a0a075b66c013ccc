// Attention over keys known only on the device: key blocks, blocks selected by each query, packed documents. Nothing
// here is read on the host.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "fretwork/context.h"
#include "fretwork/ops.h"
#include "fretwork/pattern.h"
#include "fretwork/tensor.h"

namespace fretwork {

/// Which keys a query sees, as the device has it. Exactly one of four forms is given, with what belongs to it alone:
/// `causal` to selections and documents, `left` and `right` to documents.
struct DeviceKeys {
  /// Blocks of `block_rows` queries and `block_cols` keys (16, 32, 64 or 128 each), R × C of them: a bool mask
  /// (B|1, Hq|Hk|1, R, C); or lists, i32: `counts` (B|1, Hq|Hk|1, R) and `indices` (B|1, Hq|Hk|1, R, N). Entries from
  /// the count on and those outside [0, C) are ignored. Those of a key head hold for all of its query heads.
  std::optional<ConstTensorView> mask = {}, counts = {}, indices = {};
  /// Blocks of `block_cols` keys for each query, i32 (B, Hk, Sq, T): entries outside [0, C) stand for none, no block
  /// stands there twice. `causal`: key j is seen if j ≤ i + Sk − Sq.
  std::optional<ConstTensorView> selected = {};
  /// Documents side by side, i32 (n + 1): document d has queries cu_q[d] … cu_q[d + 1] − 1 and keys likewise. B is 1.
  /// Query i of Lq sees key j of Lk if, with p = i + Lk − Lq, j ≤ p (`causal`) and −left ≤ j − p ≤ right.
  std::optional<ConstTensorView> cu_q = {}, cu_k = {};
  std::int64_t block_rows = 128, block_cols = 128;
  bool causal = false;
  std::optional<std::int64_t> left = {}, right = {};
  std::optional<std::int64_t> max_q = {}, max_k = {};  ///< bounds of the documents' lengths
};

/// `attention` where a query sees the keys that `keys` names and, of blocks, `pattern` allows: one whose rows and
/// columns are intervals; the other forms take none. Documents and selections take no option but a scale and sinks.
/// Rows outside of all documents are zeros with lse −inf, without a sink.
void dynamic_attention(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                       const PatternPtr& pattern, const DeviceKeys& keys, const TensorView& out,
                       const std::optional<TensorView>& lse, Context& context, const AttentionOptions& options = {});

/// The gradients, from those of out and lse (not given: zero); all else is the forward's.
void dynamic_attention_backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                                const PatternPtr& pattern, const DeviceKeys& keys, const ConstTensorView& out,
                                const ConstTensorView& lse, const ConstTensorView& d_out,
                                const std::optional<ConstTensorView>& d_lse, const AttentionGradients& gradients,
                                Context& context, const AttentionOptions& options = {});

}  // namespace fretwork
