// Operands, structures and their calls.
#include "layers.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "fretwork/two_four.h"
#include "runtime/cublas.h"

namespace fretwork::cli {
namespace {

/// How much denser a layer of blocks may be than its recipe says.
constexpr double kClose = 1.25;
constexpr std::uint64_t kOperandSeed = 2;  // not a weight's: products of equal rows would overflow in fp16

std::int64_t bytes_of(const TensorView& view) {
  return view.elements() * static_cast<std::int64_t>(size_of(view.dtype));
}

/// A matrix with leading dimensions of 1, as block products take it.
TensorView four_dims(const Data& data) {
  const TensorView& view = data.view();
  return {view.data, view.dtype, {1, 1, view.size(0), view.size(1)}, view.device};
}

/// Room for `shape` in the operands' d_w, from element `first` on.
TensorView gradient_like(const LayerOperands& operands, const TensorView& weight, std::int64_t first = 0) {
  TensorView view = weight;
  view.data =
      static_cast<std::byte*>(operands.d_w.view().data) + static_cast<std::size_t>(first) * size_of(operands.dtype);
  return view;
}

/// (out, in) as the only factor of a chain, (1, out, in, 1).
TensorView as_factor(const TensorView& w) {
  TensorView view(w.data, w.dtype, {1, w.size(0), w.size(1), 1}, w.device);
  view.strides = {w.strides[0] * w.sizes[0], w.strides[0], w.strides[1], w.strides[1]};
  return view;
}

TensorView factor_transposed(TensorView w) {
  std::swap(w.sizes[1], w.sizes[2]);
  std::swap(w.strides[1], w.strides[2]);
  return w;
}

/// The three products of a layer as cuBLASLt has them: row-major matrices are transposed ones to it.
struct CublasProducts {
  cublas::Product forward, input, weight;

  CublasProducts(const LayerOperands& operands, const TensorView& w, const TensorView& d_w) {
    const auto [in, out, rows] = operands.sizes;
    const auto matrix = [](const TensorView& view, std::int64_t lead, bool transposed) {
      return cublas::Matrix{.data = view.data, .lead = lead, .batch = 0, .transposed = transposed};
    };
    const auto product = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
      cublas::Product made;
      made.dtype = operands.dtype;
      made.rows = m, made.cols = n, made.depth = k;
      return made;
    };
    forward = product(out, rows, in);
    forward.left = matrix(w, in, true);
    forward.right = matrix(operands.x.view(), in, false);
    forward.out = matrix(operands.y.view(), out, false);
    input = product(in, rows, out);
    input.left = matrix(w, in, false);
    input.right = matrix(operands.d_y.view(), out, false);
    input.out = matrix(operands.d_x.view(), in, false);
    weight = product(in, out, rows);
    weight.left = matrix(operands.x.view(), in, false);
    weight.right = matrix(operands.d_y.view(), out, true);
    weight.out = matrix(d_w, in, false);
  }

  bool fit(const LayerOperands& operands) const {
    const auto fits = [&](const cublas::Product& one) { return cublas::fits(one, operands.device.index); };
    return operands.device.type == DeviceType::cuda && fits(forward) &&
           (!operands.training || (fits(input) && fits(weight)));
  }
};

/// Gradients of a dense layer, from its weight `w`.
void dense_backward(const LayerOperands& operands, const TensorView& w, const TensorView& d_w, Context& context) {
  const CublasProducts products(operands, w, d_w);
  if (products.fit(operands)) {
    cublas::run(products.input, context);
    return cublas::run(products.weight, context);
  }
  ksmm(operands.d_y.view(), factor_transposed(as_factor(w)), operands.d_x.view(), context);
  ksmm_backward_weight(operands.x.view(), operands.d_y.view(), as_factor(d_w), {}, context);
}

std::vector<double> drawn_row(const Data& data, std::int64_t first, std::int64_t count) {
  std::vector<double> row(static_cast<std::size_t>(count));
  for (std::int64_t n = 0; n < count; ++n) {
    row[static_cast<std::size_t>(n)] = data.drawn(first + n);
  }
  return row;
}

/// The half of each group that is larger, ties going to the lower index; zeros for the rest.
void keep_half(std::vector<double>& row, std::int64_t group) {
  for (auto begin = row.begin(); begin != row.end(); begin += group) {
    std::vector<int> order(static_cast<std::size_t>(group));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int a, int b) { return std::abs(begin[a]) > std::abs(begin[b]); });
    for (auto n = group / 2; n < group; ++n) {
      begin[order[static_cast<std::size_t>(n)]] = 0;
    }
  }
}

/// Σ a·b and √Σ (a·b)², line by line, of what the device holds.
struct Inner {
  double sum = 0, squares = 0;

  Inner(const Data& a, const TensorView& like, const Data& b, std::int64_t b_first = 0) {
    constexpr std::int64_t kLine = 1 << 20;
    for (std::int64_t at = 0; at < like.elements(); at += kLine) {
      const std::int64_t count = std::min(kLine, like.elements() - at);
      const auto left = a.read(at, count), right = b.read(b_first + at, count);
      for (std::size_t n = 0; n < left.size(); ++n) {
        const double product = left[n] * right[n];
        sum += product;
        squares += product * product;
      }
    }
  }
};

/// Whether two sums of many rounded terms are one number.
bool agree(const Inner& one, const Inner& other, double tolerance) {
  const double scale = std::sqrt(std::max(one.squares, other.squares));
  return std::abs(one.sum - other.sum) <= tolerance * scale;  // false for NaN
}

bool gradients_right(const Layer& layer, const LayerOperands& operands, double tolerance) {
  const Inner want(operands.d_y, operands.y.view(), operands.y);
  bool right = agree(Inner(operands.d_x, operands.d_x.view(), operands.x), want, tolerance);
  std::int64_t first = 0;
  for (const auto& weight : layer.weights) {
    right = right && agree(Inner(*weight, weight->view(), operands.d_w, first), want, tolerance);
    first += weight->view().elements();
  }
  return right;
}

std::shared_ptr<Data> make_data(const LayerOperands& operands, std::initializer_list<std::int64_t> sizes) {
  return std::make_shared<Data>(operands.device, operands.dtype, sizes);
}

/// The largest block that both are multiples of; 0 where it would be smaller than blocks are.
std::int64_t largest_block(std::int64_t in, std::int64_t out) {
  for (std::int64_t block = 128; block >= 8; --block) {
    if (in % block == 0 && out % block == 0) {
      return block;
    }
  }
  return 0;
}

void compress_pruned(const Data& dense, const TwoFour& weight, Context& context) {
  const Data pruned(dense.view().device, dense.view().dtype, {dense.view().size(0), dense.view().size(1)});
  two_four::prune(dense.view(), 1, false, pruned.view(), context);
  two_four::compress(pruned.view(), weight, nullptr, context);
  if (dense.view().device.type == DeviceType::cuda) {
    cuda::synchronize(context.stream);  // before `pruned` goes
  }
}

/// A GPU expands the weight, multiplies densely and gathers, as the Python layer does.
std::function<void(Context&)> two_four_backward(LayerOperands& operands, const TwoFour& weight) {
  const bool expands = operands.training && operands.device.type == DeviceType::cuda;
  const std::int64_t out = expands ? operands.sizes.out : 0;
  const auto dense = make_data(operands, {out, operands.sizes.in}),
             d_dense = make_data(operands, {out, operands.sizes.in});
  return [=, &operands](Context& context) {
    const TensorView d_values = gradient_like(operands, weight.values);
    if (expands) {
      two_four::to_dense(weight, dense->view(), context);
      dense_backward(operands, dense->view(), d_dense->view(), context);
      return two_four::gather(d_dense->view(), weight.metadata, 1, d_values, context);
    }
    two_four::linear_backward_input(operands.d_y.view(), weight, operands.d_x.view(), context);
    two_four::linear_backward_values(operands.x.view(), operands.d_y.view(), weight.metadata, d_values, context);
  };
}

/// A row of the product of factors: e_row through the last factor, then the one before it.
std::vector<double> chain_row(const std::vector<KroneckerPtr>& chain,
                              const std::vector<std::shared_ptr<const Data>>& weights, std::int64_t row) {
  std::vector<double> left(static_cast<std::size_t>(chain.back()->rows()));
  left[static_cast<std::size_t>(row)] = 1;
  for (std::size_t n = chain.size(); n-- > 0;) {
    const auto& [a, b, c, d] = chain[n]->sizes();
    std::vector<double> next(static_cast<std::size_t>(chain[n]->cols()));
    for (std::int64_t at = 0; at < chain[n]->rows(); ++at) {
      const double factor = left[static_cast<std::size_t>(at)];
      const std::int64_t i = at / (b * d), j = at / d % b, l = at % d;
      for (std::int64_t k = 0; factor != 0 && k < c; ++k) {
        next[static_cast<std::size_t>((i * c + k) * d + l)] +=
            factor * weights[n]->drawn(((i * b + j) * c + k) * d + l);
      }
    }
    left = std::move(next);
  }
  return left;
}

}  // namespace

LayerOperands::LayerOperands(const LayerSizes& of, DType type, Device where, bool with_gradients)
    : sizes(of),
      dtype(type),
      device(where),
      training(with_gradients),
      x(where, type, {of.rows, of.in}, kOperandSeed),
      y(where, type, {of.rows, of.out}),
      d_y(where, type, {with_gradients ? of.rows : 0, of.out}, kOperandSeed),
      d_x(where, type, {with_gradients ? of.rows : 0, of.in}),
      d_w(where, type, {with_gradients ? of.out : 0, of.in}) {}

std::vector<Layer> dense_layers(LayerOperands& operands) {
  const auto [in, out, rows] = operands.sizes;
  const auto w = make_data(operands, {out, in});
  Layer dense;
  dense.kind = "dense";
  dense.parameters = out * in;
  dense.memory = bytes_of(w->view());
  dense.weights = {w};
  dense.row = [w, n = in](std::int64_t row) { return drawn_row(*w, row * n, n); };
  dense.backward = [w, &operands](Context& context) {
    dense_backward(operands, w->view(), gradient_like(operands, w->view()), context);
  };
  std::vector<Layer> found;
  const CublasProducts products(operands, w->view(), gradient_like(operands, w->view()));
  if (products.fit(operands)) {
    dense.name = "cuBLASLt";
    dense.forward = [w, forward = products.forward](Context& context) { cublas::run(forward, context); };
    found.push_back(dense);
  }
  dense.name = "ksmm with one factor";
  dense.forward = [w, &operands](Context& context) {
    ksmm(operands.x.view(), as_factor(w->view()), operands.y.view(), context);
  };
  found.push_back(dense);
  if (const std::int64_t block = largest_block(in, out); block > 0) {
    Layer blocks = block_layer(operands, random_blocks({1, out / block, in / block, block, block}, 1.0, 0));
    blocks.kind = dense.kind;
    blocks.name = "a block product with every block";
    blocks.recipe.clear();
    blocks.memory = dense.memory;
    found.push_back(std::move(blocks));
  }
  return found;
}

Layer two_four_layer(LayerOperands& operands) {
  const auto [in, out, rows] = operands.sizes;
  const auto dense = make_data(operands, {out, in}), values = make_data(operands, {out, in / 2});
  const auto metadata =
      std::make_shared<Data>(operands.device, DType::i16,
                             std::initializer_list<std::int64_t>{out, two_four::words(in, operands.dtype, DType::i16)});
  const TwoFour weight{values->view(), metadata->view(), 1};
  Layer layer;
  layer.kind = "two_four";
  layer.recipe = "TwoFour(prune='magnitude', trainable='values')";
  layer.name = "2:4";
  layer.parameters = out * in / 2;
  layer.memory = bytes_of(values->view()) + bytes_of(metadata->view());
  layer.weights = {values};
  layer.forward = [weight, metadata, dense, &operands, packed = false](Context& context) mutable {
    if (!packed) {
      compress_pruned(*dense, weight, context);
      packed = true;
    }
    two_four::linear(operands.x.view(), weight, operands.y.view(), context);
  };
  layer.backward = two_four_backward(operands, weight);
  layer.row = [dense, n = in, group = two_four::group(operands.dtype)](std::int64_t row) {
    std::vector<double> found = drawn_row(*dense, row * n, n);
    keep_half(found, group);
    return found;
  };
  return layer;
}

Layer block_layer(LayerOperands& operands, const BlockLayoutPtr& layout) {
  const auto& of = layout->sizes();
  const auto values = make_data(operands, {layout->nnz(), of.block_rows, of.block_cols});
  const TensorView packed(values->view().data, operands.dtype, {1, layout->nnz(), of.block_rows, of.block_cols},
                          operands.device);
  Layer layer;
  layer.kind = "block";
  layer.parameters = packed.elements();
  layer.memory = bytes_of(packed) + 8 * layout->nnz();  // a row and a column of 32 bits for each block
  layer.weights = {values};
  layer.forward = [values, packed, layout, &operands](Context& context) {
    MatmulOptions options;
    options.trans_b = true;
    dds(four_dims(operands.x), packed, layout, four_dims(operands.y), context, options);
  };
  layer.backward = [values, packed, layout, &operands](Context& context) {
    dds(four_dims(operands.d_y), packed, layout, four_dims(operands.d_x), context);
    MatmulOptions options;
    options.trans_a = true;
    sdd(four_dims(operands.d_y), four_dims(operands.x), layout, gradient_like(operands, packed), context, options);
  };
  layer.row = [values, layout, &of](std::int64_t row) {
    std::vector<double> found(static_cast<std::size_t>(of.cols * of.block_cols));
    for (const auto& [column, block] : layout->by_row().line(row / of.block_rows)) {
      const auto part =
          drawn_row(*values, (block * of.block_rows + row % of.block_rows) * of.block_cols, of.block_cols);
      std::ranges::copy(part, found.begin() + column * of.block_cols);
    }
    return found;
  };
  return layer;
}

BlockLayoutPtr layout_for(const LayerSizes& sizes, std::int64_t block, double density) {
  const std::int64_t rows = sizes.out / block, cols = sizes.in / block;
  const auto all = static_cast<double>(rows * cols);
  std::mt19937 random(1);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(rows * cols));
  std::vector<std::size_t> rest(mask.size());
  std::iota(rest.begin(), rest.end(), std::size_t{0});
  for (std::int64_t row = 0; row < rows; ++row) {
    mask[static_cast<std::size_t>(row * cols) + random() % static_cast<std::uint64_t>(cols)] = 1;
  }
  std::erase_if(rest, [&](std::size_t at) { return mask[at] == 1; });
  std::ranges::shuffle(rest, random);
  const auto more = static_cast<std::int64_t>(std::ceil(density * all)) - rows;
  for (std::int64_t n = 0; n < more; ++n) {
    mask[rest[static_cast<std::size_t>(n)]] = 1;
  }
  return BlockLayout::make({1, rows, cols, block, block}, mask);
}

Layer factor_layer(LayerOperands& operands, std::span<const KroneckerPtr> patterns) {
  const std::vector<KroneckerPtr> chain(patterns.begin(), patterns.end());
  Layer layer;
  layer.kind = "kronecker";
  std::vector<ConstTensorView> views;
  std::vector<std::shared_ptr<Data>> between;  // x of each factor but the first
  for (const KroneckerPtr& pattern : chain) {
    const auto& [a, b, c, d] = pattern->sizes();
    const auto w = make_data(operands, {a, b, c, d});
    layer.weights.push_back(w);
    layer.parameters += w->view().elements();
    layer.memory += bytes_of(w->view());
    views.push_back(w->view());
    if (operands.training && pattern != chain.back()) {
      between.push_back(make_data(operands, {operands.sizes.rows, pattern->rows()}));
      between.push_back(make_data(operands, {operands.sizes.rows, pattern->rows()}));  // its gradient
    }
  }
  const auto weights = layer.weights;
  layer.forward = [views, weights, between, &operands](Context& context) {
    if (between.empty()) {
      return ksmm_chain(operands.x.view(), views, operands.y.view(), context);
    }
    for (std::size_t n = 0; n < views.size(); ++n) {
      ksmm(n == 0 ? operands.x.view() : between[2 * n - 2]->view(), views[n],
           n + 1 == views.size() ? operands.y.view() : between[2 * n]->view(), context);
    }
  };
  layer.backward = [weights, between, &operands](Context& context) {
    std::int64_t end = 0;  // of this factor's gradient within d_w
    for (const auto& weight : weights) {
      end += weight->view().elements();
    }
    for (std::size_t n = weights.size(); n-- > 0;) {
      const TensorView& w = weights[n]->view();
      const TensorView& d_out = n + 1 == weights.size() ? operands.d_y.view() : between[2 * n + 1]->view();
      ksmm(d_out, factor_transposed(w), n == 0 ? operands.d_x.view() : between[2 * n - 1]->view(), context);
      end -= w.elements();
      ksmm_backward_weight(n == 0 ? operands.x.view() : between[2 * n - 2]->view(), d_out,
                           gradient_like(operands, w, end), {}, context);
    }
  };
  layer.row = [weights, chain](std::int64_t row) { return chain_row(chain, weights, row); };
  return layer;
}

std::vector<Layer> sparse_layers(LayerOperands& operands, std::span<const std::string> kinds) {
  const auto [in, out, rows] = operands.sizes;
  const auto asked = [&](const char* kind) { return std::ranges::find(kinds, kind) != kinds.end(); };
  std::vector<Layer> found;
  if (asked("two_four") && in % two_four::group(operands.dtype) == 0) {
    found.push_back(two_four_layer(operands));
  }
  for (const std::int64_t block : {32, 64, 128}) {
    for (const double density : {0.5, 0.25, 0.1}) {
      if (!asked("block") || in % block != 0 || out % block != 0) {
        continue;
      }
      const BlockLayoutPtr layout = layout_for(operands.sizes, block, density);
      // Whole blocks, one in each row, do not make every density of a small layer.
      if (layout->density() <= kClose * density) {
        found.push_back(block_layer(operands, layout));
        found.back().recipe = fmt::format("Block(block={}, density={})", block, density);
        found.back().name = fmt::format("blocks of {} at {:.0f}%", block, 100 * density);
      }
    }
  }
  for (const std::int64_t p : {8, 16, 32, 64, 128}) {
    // Else the factors have as many elements as the dense weight.
    if (asked("monarch") && in % p == 0 && out % p == 0 && in / p + p < in) {
      found.push_back(factor_layer(operands, kronecker::monarch(out, in, p, p)));
      found.back().kind = "monarch";
      found.back().recipe = fmt::format("Monarch(p={}, q=None)", p);
      found.back().name = fmt::format("monarch of {}", p);
    }
  }
  return found;
}

Verdict check(const Layer& layer, LayerOperands& operands, Context& context) {
  operands.y.clear();
  layer.forward(context);
  const auto [in, out, rows] = operands.sizes;
  const double tolerance = tolerance_of(operands.dtype, context.precision);
  std::mt19937 random(1);
  const auto places = sample_places(out, 16, random);
  std::vector<std::vector<double>> weight;
  for (const std::int64_t at : places) {
    weight.push_back(layer.row(at));
  }
  double largest = 0, worst = 0, squares = 0;
  bool finite = true;
  for (const std::int64_t row : sample_places(rows, 16, random)) {
    const auto found = operands.y.read(row * out, out);
    const auto x = drawn_row(operands.x, row * in, in);
    finite = finite && std::ranges::all_of(found, [](double y) { return std::isfinite(y); });
    for (std::size_t n = 0; n < places.size(); ++n) {
      const double want = std::inner_product(x.begin(), x.end(), weight[n].begin(), 0.0);
      const double error = std::abs(found[static_cast<std::size_t>(places[n])] - want);
      largest = std::max(largest, std::abs(want));
      worst = std::max(worst, error);
      squares += error * error;
    }
  }
  bool right = finite && worst <= tolerance * largest;
  if (right && operands.training) {
    operands.d_x.clear();
    operands.d_w.clear();
    layer.backward(context);
    right = gradients_right(layer, operands, tolerance);
  }
  return {true, right, squares / static_cast<double>(places.size())};
}

Dense best_dense(const LayerSizes& sizes, DType dtype, Stopwatch& clock) {
  LayerOperands operands(sizes, size_of(dtype) == 1 ? DType::bf16 : dtype, clock.device());
  Context context = clock.context();
  Dense best;
  for (const Layer& layer : dense_layers(operands)) {
    const double ms = clock.cold([&] { layer.forward(context); }).ms;
    if (best.name.empty() || ms < best.ms) {
      best = {ms, layer.name};
    }
  }
  return best;
}

double dense_rate(std::int64_t n, DType dtype, Stopwatch& clock) {
  const auto size = static_cast<double>(n);
  return 2 * size * size * size / best_dense({n, n, n}, dtype, clock).ms;
}

}  // namespace fretwork::cli
