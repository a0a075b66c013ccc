// Linear layers y = x·Wᵀ of one size in every structure: what they hold, calls on them, and whether they are right.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fretwork/pattern.h"
#include "measure.h"

namespace fretwork::cli {

/// x is rows × in, W is out × in.
struct LayerSizes {
  std::int64_t in, out, rows;
};

/// What all layers of one size read and write. Without training, gradients are empty.
struct LayerOperands {
  LayerOperands(const LayerSizes& sizes, DType dtype, Device device, bool training = false);

  LayerSizes sizes;
  DType dtype;
  Device device;
  bool training;
  Data x, y, d_y, d_x;
  Data d_w;  ///< room for the gradient of any layer's weights
};

/// A weight in one structure. Valid as long as its operands are.
struct Layer {
  std::string kind;    ///< "dense", "two_four", "block", "monarch"
  std::string recipe;  ///< as Python writes it; of a dense layer nothing
  std::string name;    ///< as a sentence says it; of a dense layer what multiplies
  std::int64_t parameters = 0;
  std::int64_t memory = 0;                 ///< bytes of the weight, with what says where its elements are
  std::function<void(Context&)> forward;   ///< writes y
  std::function<void(Context&)> backward;  ///< writes d_x and d_w, after `forward`
  /// A row of W, from the definition of its structure.
  std::function<std::vector<double>(std::int64_t)> row;
  /// What is trained, and where its gradients are within d_w.
  std::vector<std::shared_ptr<const Data>> weights;
};

/// Every dense product that this program has on the device, each called by its name: cuBLASLt where it is installed,
/// and this library's products with nothing left out.
std::vector<Layer> dense_layers(LayerOperands& operands);
Layer two_four_layer(LayerOperands& operands);
/// The blocks of a layout of one head.
Layer block_layer(LayerOperands& operands, const BlockLayoutPtr& layout);
/// ⌈density · blocks⌉ of them, at random, but one in each block row.
BlockLayoutPtr layout_for(const LayerSizes& sizes, std::int64_t block, double density);
/// A chain of factors, in order of application.
Layer factor_layer(LayerOperands& operands, std::span<const KroneckerPtr> patterns);

/// All structures of `kinds` that fit the sizes, without dense ones: 2:4, blocks of 32 to 128 at densities of 0.5 to
/// 0.1 as far as whole blocks make them, Monarch of several sizes.
std::vector<Layer> sparse_layers(LayerOperands& operands, std::span<const std::string> kinds);

/// Calls the layer and compares samples of y with sums in float64. In training the gradients, too: as y is linear in x
/// and in each weight, ⟨d_x, x⟩ and each ⟨d_w, w⟩ are ⟨d_y, y⟩.
Verdict check(const Layer& layer, LayerOperands& operands, Context& context);

/// The fastest of `dense_layers`.
struct Dense {
  double ms = 0;
  std::string name;
};
/// Types of 8 bits have no dense product here: bfloat16 stands for them.
Dense best_dense(const LayerSizes& sizes, DType dtype, Stopwatch& clock);
/// FLOP a millisecond of the best product of three square matrices.
double dense_rate(std::int64_t n, DType dtype, Stopwatch& clock);

}  // namespace fretwork::cli
