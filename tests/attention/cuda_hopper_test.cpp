// Attention's Hopper kernels on a real GPU against float64 on the host, over plans made here element by element.
// Skipped where there is no Hopper GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/half.h"
#include "device/random.cuh"
#include "fretwork/patterns.h"
#include "ops/attention/cuda/families.h"
#include "runtime/cuda_driver.h"
#include "runtime/nvrtc.h"
#include "support/tensor.h"

namespace fretwork::attention_op {
namespace {

namespace driver = fretwork::cuda;
using Index = std::int64_t;
using Predicate = std::function<bool(Index, Index)>;

// ------------------------------------------------------------------------------------------------------ plans

/// How a side is cut into tiles: plain, by residue classes, or in patches of a grid.
struct Tiling {
  Index residues = 1;
  Index height = 0, width = 0, patch_height = 0, patch_width = 0;
};

struct Tiles {
  Order order;
  std::vector<Tile> tiles;
};

Tiles cut(Tiling tiling, Index size, int side) {
  Tiles made;
  while (tiling.patch_height * tiling.patch_width > side) {
    tiling.patch_height /= 2;
  }
  if (tiling.height > 0) {
    made.order = {{1, static_cast<int>(tiling.patch_height), static_cast<int>(tiling.patch_width)},
                  {0, tiling.width, 1}};
    for (Index y = 0; y < tiling.height; y += tiling.patch_height) {
      for (Index x = 0; x < tiling.width; x += tiling.patch_width) {
        made.tiles.push_back({y * tiling.width + x,
                              {1, static_cast<int>(std::min(tiling.patch_height, tiling.height - y)),
                               static_cast<int>(std::min(tiling.patch_width, tiling.width - x))},
                              -1});
      }
    }
    return made;
  }
  const Index r = tiling.residues;
  made.order = {{1, 1, side}, {0, 0, r}};
  for (Index c = 0; c < std::min(r, size); ++c) {
    const Index count = (size - c + r - 1) / r;
    for (Index t = 0; t < count; t += side) {
      made.tiles.push_back({c + t * r, {1, 1, static_cast<int>(std::min<Index>(side, count - t))}, -1});
    }
  }
  return made;
}

/// Tokens of a tile's places, −1 where there is none.
std::vector<Index> tokens_of(const Order& order, const Tile& tile, int side) {
  std::vector<Index> tokens(static_cast<std::size_t>(side), -1);
  for (int u0 = 0; u0 < tile.count[0]; ++u0) {
    for (int u1 = 0; u1 < tile.count[1]; ++u1) {
      for (int u2 = 0; u2 < tile.count[2]; ++u2) {
        tokens[static_cast<std::size_t>((u0 * order.extent[1] + u1) * order.extent[2] + u2)] =
            tile.base + u0 * order.stride[0] + u1 * order.stride[1] + u2 * order.stride[2];
      }
    }
  }
  return tokens;
}

/// A part of a pattern that is tiled in one way; parts are disjoint.
struct Layer {
  Predicate has;
  Tiling rows{}, cols{};
};

struct Pattern {
  std::string name;
  Index rows, cols;
  std::vector<Layer> layers;

  bool has(Index i, Index j) const {
    return std::any_of(layers.begin(), layers.end(), [&](const Layer& layer) { return layer.has(i, j); });
  }
  Pattern transposed() const {
    Pattern other{name, cols, rows, {}};
    for (const Layer& layer : layers) {
      other.layers.push_back({[has = layer.has](Index i, Index j) { return has(j, i); }, layer.cols, layer.rows});
    }
    return other;
  }
};

/// Makes plans by looking at every element.
class Planner {
 public:
  Planner(const Pattern& pattern, const TileShape& shape) : pattern_(pattern) {
    plan_.shape = shape;
    plan_.rows = pattern.rows;
    plan_.cols = pattern.cols;
    for (const Layer& layer : pattern.layers) {
      add(layer);
    }
    std::stable_sort(plan_.components.begin(), plan_.components.end(),
                     [](const Component& a, const Component& b) { return a.pairs > b.pairs; });
  }
  /// Marks the columns that nothing uses.
  Planner& mark_unused() {
    std::vector<bool> used(static_cast<std::size_t>(pattern_.cols));
    for (Index i = 0; i < pattern_.rows; ++i) {
      for (Index j = 0; j < pattern_.cols; ++j) {
        used[static_cast<std::size_t>(j)] = used[static_cast<std::size_t>(j)] || pattern_.has(i, j);
      }
    }
    const int words = std::max(plan_.shape.rows, plan_.shape.cols) / 32;
    for (Component& component : plan_.components) {
      for (Tile& tile : component.col_tiles) {
        std::vector<std::uint32_t> bits(static_cast<std::size_t>(words));
        bool all = true;
        const auto tokens = tokens_of(component.col_order, tile, plan_.shape.cols);
        for (std::size_t n = 0; n < tokens.size(); ++n) {
          const bool is = tokens[n] >= 0 && used[static_cast<std::size_t>(tokens[n])];
          bits[n / 32] |= is ? 1u << n % 32 : 0;
          all = all && (is || tokens[n] < 0);
        }
        if (!all) {
          tile.used = static_cast<int>(plan_.used.size());
          plan_.used.insert(plan_.used.end(), bits.begin(), bits.end());
        }
      }
    }
    return *this;
  }
  std::shared_ptr<const Plan> get() const { return std::make_shared<const Plan>(plan_); }

 private:
  void add(const Layer& layer) {
    const auto [rows, cols] = plan_.shape;
    Component made;
    Tiles row = cut(layer.rows, pattern_.rows, rows), col = cut(layer.cols, pattern_.cols, cols);
    made.row_order = row.order;
    made.col_order = col.order;
    made.row_tiles = row.tiles;
    made.col_tiles = col.tiles;
    made.covers_rows = true;
    made.first.push_back(0);
    for (const Tile& r : row.tiles) {
      const auto is = tokens_of(row.order, r, rows);
      std::vector<Run> masked, whole;
      for (std::size_t c = 0; c < col.tiles.size(); ++c) {
        const auto mask = classify(layer.has, is, tokens_of(col.order, col.tiles[c], cols));
        if (mask) {
          std::vector<Run>& list = *mask < 0 ? whole : masked;
          if (!list.empty() && list.back().mask == *mask &&
              list.back().first + list.back().count == static_cast<int>(c)) {
            ++list.back().count;
          } else {
            list.push_back({static_cast<int>(c), 1, *mask});
          }
          ++made.pairs;
        }
      }
      made.runs.insert(made.runs.end(), masked.begin(), masked.end());
      made.runs.insert(made.runs.end(), whole.begin(), whole.end());
      made.first.push_back(static_cast<Index>(made.runs.size()));
    }
    plan_.components.push_back(std::move(made));
  }

  /// A mask's index, −1 where every element is there, nothing where none is.
  std::optional<int> classify(const Predicate& has, const std::vector<Index>& rows, const std::vector<Index>& cols) {
    std::vector<std::uint32_t> bits(rows.size() * cols.size() / 32);
    std::size_t count = 0;
    int low = 1 << 20, high = -(1 << 20), limit = 0;
    for (std::size_t m = 0; m < rows.size(); ++m) {
      for (std::size_t n = 0; n < cols.size(); ++n) {
        if (rows[m] >= 0 && cols[n] >= 0 && has(rows[m], cols[n])) {
          const std::size_t at = m * cols.size() + n;
          bits[at / 32] |= 1u << at % 32;
          ++count;
          const int difference = static_cast<int>(n) - static_cast<int>(m);
          low = std::min(low, difference);
          high = std::max(high, difference);
          limit = std::max(limit, static_cast<int>(n) + 1);
        }
      }
    }
    if (count == 0) {
      return std::nullopt;
    }
    if (count == rows.size() * cols.size()) {
      return -1;
    }
    bool band = true;
    for (std::size_t m = 0; m < rows.size() && band; ++m) {
      for (std::size_t n = 0; n < cols.size() && rows[m] >= 0; ++n) {
        const int difference = static_cast<int>(n) - static_cast<int>(m);
        const bool there = difference >= low && difference <= high && static_cast<int>(n) < limit;
        const std::size_t at = m * cols.size() + n;
        band = band && there == ((bits[at / 32] >> at % 32 & 1) != 0);
      }
    }
    return band ? find({low, high, limit, -1}) : find_bits(bits);
  }
  int find(const Mask& mask) {
    const auto same = [&](const Mask& m) {
      return m.low == mask.low && m.high == mask.high && m.limit == mask.limit && m.bits == mask.bits;
    };
    const auto found = std::find_if(plan_.masks.begin(), plan_.masks.end(), same);
    if (found != plan_.masks.end()) {
      return static_cast<int>(found - plan_.masks.begin());
    }
    plan_.masks.push_back(mask);
    return static_cast<int>(plan_.masks.size()) - 1;
  }
  int find_bits(const std::vector<std::uint32_t>& bits) {
    const auto [place, fresh] = known_.try_emplace(bits, static_cast<int>(plan_.bits.size()));
    if (fresh) {
      plan_.bits.insert(plan_.bits.end(), bits.begin(), bits.end());
    }
    return find({0, 0, 0, place->second});
  }

  const Pattern& pattern_;
  Plan plan_;
  std::map<std::vector<std::uint32_t>, int> known_;
};

constexpr Index kFar = 1 << 30;

Predicate band(Index low, Index high) {
  return [=](Index i, Index j) { return j - i >= low && j - i <= high; };
}
Predicate class_band(Index r, Index low, Index high) {
  return [=](Index i, Index j) { return i % r == j % r && j / r - i / r >= low && j / r - i / r <= high; };
}

Pattern full(Index rows, Index cols) { return {"full", rows, cols, {{band(-kFar, kFar)}}}; }
Pattern causal(Index s) { return {"causal", s, s, {{band(-kFar, 0)}}}; }
Pattern window(Index s, Index w) { return {"window", s, s, {{band(-w, w)}}}; }
Pattern dilated(Index s, Index r, Index w) {
  return {"dilated", s, s, {{class_band(r, -w, w), {r, 0, 0, 0, 0}, {r, 0, 0, 0, 0}}}};
}
/// The last `stride` keys, and those a multiple of it before.
Pattern strided(Index s, Index stride) {
  return {"strided",
          s,
          s,
          {{band(1 - stride, 0)}, {class_band(stride, -kFar, -1), {stride, 0, 0, 0, 0}, {stride, 0, 0, 0, 0}}}};
}
Pattern neighbourhood(Index height, Index width, Index window, Index patch_height, Index patch_width) {
  const auto near = [window](Index i, Index j, Index n) {
    const Index begin = std::clamp<Index>(i - window / 2, 0, n - window);
    return j >= begin && j < begin + window;
  };
  const Tiling tiling{1, height, width, patch_height, patch_width};
  return {"neighbourhood",
          height * width,
          height * width,
          {{[=](Index i, Index j) { return near(i / width, j / width, height) && near(i % width, j % width, width); },
            tiling, tiling}}};
}
Pattern documents(const std::vector<Index>& lengths) {
  std::vector<int> of;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    of.insert(of.end(), static_cast<std::size_t>(lengths[d]), static_cast<int>(d));
  }
  const auto size = static_cast<Index>(of.size());
  return {"documents", size, size, {{[of](Index i, Index j) {
            return j <= i && of[static_cast<std::size_t>(i)] == of[static_cast<std::size_t>(j)];
          }}}};
}
Pattern longformer(Index s, Index w, Index globals) {
  return {"longformer", s, s, {{[=](Index i, Index j) { return std::abs(i - j) <= w || i < globals || j < globals; }}}};
}
/// Rows and keys of one class only: the others are empty or unused.
Pattern one_class(Index s, Index r, Index head) {
  return {"one class", s, s, {{[=](Index i, Index j) { return i % r == head && j % r == head && j <= i; }}}};
}

// ------------------------------------------------------------------------------------------------------- data

float widen(DType dtype, std::uint16_t bits) {
  return dtype == DType::f16 ? float_from_f16(bits) : float_from_bf16(bits);
}

/// A function of the driver that only this test needs.
template <typename... Arguments>
void call(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  if (const int code = function != nullptr ? function(arguments...) : -1; code != 0) {
    throw std::runtime_error(std::string(name) + " gives " + std::to_string(code));
  }
}

/// Device memory between two holes in the address space: who touches a byte before it, or after it, meets a fault.
class Fenced {
 public:
  explicit Fenced(std::size_t bytes) {
    struct Location {
      int type = 1, id = 0;  // on a device
    };
    struct {
      int type = 1, handles = 0;  // pinned there
      Location location;
      void* metadata = nullptr;
      unsigned char flags[8] = {};
    } properties;
    const struct {
      Location location;
      int flags = 3;  // to read and write
    } access;
    std::size_t page = 0;
    call("cuMemGetAllocationGranularity", &page, static_cast<const void*>(&properties), 0);
    page_ = page;
    bytes_ = (bytes + page - 1) / page * page;
    call("cuMemAddressReserve", &space_, bytes_ + 2 * page, std::size_t{0}, std::uint64_t{0}, std::uint64_t{0});
    call("cuMemCreate", &memory_, bytes_, static_cast<const void*>(&properties), std::uint64_t{0});
    call("cuMemMap", space_ + page, bytes_, std::size_t{0}, memory_, std::uint64_t{0});
    call("cuMemSetAccess", space_ + page, bytes_, static_cast<const void*>(&access), std::size_t{1});
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;
  ~Fenced() {
    try {
      driver::synchronize(nullptr);
      call("cuMemUnmap", space_ + page_, bytes_);
      call("cuMemRelease", memory_);
      call("cuMemAddressFree", space_, bytes_ + 2 * page_);
    } catch (const std::exception&) {
      // The context is dead; the test says why.
    }
  }
  /// The first, or the last, `bytes` of it.
  void* data(std::size_t bytes, bool last) const {
    return reinterpret_cast<void*>(space_ + page_ + (last ? bytes_ - bytes : 0));
  }

 private:
  std::size_t page_ = 0, bytes_ = 0;
  driver::DevicePtr space_ = 0;
  std::uint64_t memory_ = 0;
};

/// Where tensors are put: anywhere, right behind a hole, or right before one.
enum class Place { anywhere, behind_hole, before_hole };
Place place = Place::anywhere;

/// A (batch, heads, tokens, depth) tensor without gaps, and its elements, with nothing around them, on the device.
class FencedTensor : public Tensor {
 public:
  using Tensor::Tensor;
  FencedTensor(DType dtype, const std::array<Index, 4>& sizes, bool tokens_first)
      : Tensor(dtype, sizes, MemoryLayout{.order = {0, tokens_first ? 2u : 1u, tokens_first ? 1u : 2u, 3}}) {}
  /// One of the same shape and strides.
  FencedTensor like() const { return {view.dtype, view.shape(), std::span(view.strides.data(), 4), std::size_t{16}}; }
  /// The elements of a row.
  std::uint16_t* row(Index b, Index h, Index s) {
    return reinterpret_cast<std::uint16_t*>(address(((b * size(1) + h) * size(2) + s) * size(3)));
  }
  FencedTensor& randomise(unsigned seed) {
    std::mt19937 random(seed);
    Tensor::randomise(random, std::normal_distribution<float>());
    return *this;
  }
  Operand operand() const { return {there_, view.strides[0], view.strides[1], view.strides[2], 1}; }
  void upload() {
    if (place == Place::anywhere) {
      device_ = driver::DeviceBuffer(0, view.data, count());
      there_ = device_.data();
      return;
    }
    const driver::DeviceScope scope(0);
    fenced_ = std::make_unique<Fenced>(count());
    there_ = fenced_->data(count(), place == Place::before_hole);
    driver::copy_to_device(there_, view.data, count(), nullptr);
    driver::synchronize(nullptr);
  }
  void download() {
    driver::copy_to_host(view.data, there_, count(), nullptr);
    driver::synchronize(nullptr);
  }

 private:
  std::size_t count() const { return static_cast<std::size_t>(view.elements()) * size_of(view.dtype); }
  driver::DeviceBuffer device_;
  std::unique_ptr<Fenced> fenced_;
  void* there_ = nullptr;
};

constexpr std::uint16_t kNan = 0x7fff;  // in both types

/// What is done to scores. A bias has no extent where it is broadcast, and `gap` elements between its rows.
struct Options {
  std::optional<DType> bias = {};
  bool batches = true, heads = true, rows = true, cols = true;
  Index gap = 0;
  bool infinite = false;  ///< some of it is −∞, of some queries all
  bool alibi = false;
  double softcap = 0, dropout = 0;
};

struct Sizes {
  DType dtype = DType::bf16;
  Index batch = 1, heads = 2, kv_heads = 2, depth = 128;
  bool tokens_first = false;
  double scale = 0.1;
  Index value_depth = 0;  ///< 0: depth
  Options options = {};

  Index values() const { return value_depth > 0 ? value_depth : depth; }
};

struct Data {
  Pattern pattern;
  Sizes sizes;
  FencedTensor q, k, v, o;
  std::vector<float> lse, bias, slopes;
  std::int64_t seed = 0x1234567890abcdef;
  driver::DeviceBuffer lse_device, bias_device, slopes_device, seed_device;

  Data(const Pattern& p, const Sizes& z)
      : pattern(p),
        sizes(z),
        q(z.dtype, {z.batch, z.heads, p.rows, z.depth}, z.tokens_first),
        k(z.dtype, {z.batch, z.kv_heads, p.cols, z.depth}, z.tokens_first),
        v(z.dtype, {z.batch, z.kv_heads, p.cols, z.values()}, z.tokens_first),
        o(z.dtype, {z.batch, z.heads, p.rows, z.values()}, z.tokens_first),
        lse(static_cast<std::size_t>(z.batch * z.heads * p.rows), std::numeric_limits<float>::quiet_NaN()) {
    q.randomise(1);
    k.randomise(2);
    v.randomise(3);
    make_options();
  }
  Bias bias_at() const {
    const Options& of = sizes.options;
    const Index row = (of.cols ? pattern.cols : 1) + of.gap, head = row * (of.rows ? pattern.rows : 1),
                batch = head * (of.heads ? sizes.heads : 1);
    return {bias_device.data(),  of.bias.value_or(DType::f32), of.batches ? batch : 0,
            of.heads ? head : 0, of.rows ? row : Index{0},     of.cols ? 1 : 0};
  }
  /// As the kernels read it.
  float bias_of(Index b, Index h, Index i, Index j) const {
    const Bias at = bias_at();
    return bias[static_cast<std::size_t>(b * at.batch + h * at.head + i * at.row + j * at.col)];
  }
  void make_options() {
    const Options& of = sizes.options;
    for (Index h = 0; h < sizes.heads && of.alibi; ++h) {
      slopes.push_back(0.01f * static_cast<float>(h + 1));
    }
    if (!of.bias) {
      return;
    }
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const Bias at = bias_at();
    bias.resize(static_cast<std::size_t>((of.batches ? sizes.batch : 1) * (of.heads ? sizes.heads : 1) *
                                         (of.rows ? pattern.rows : 1) * ((of.cols ? pattern.cols : 1) + of.gap)));
    for (std::size_t n = 0; n < bias.size(); ++n) {
      const Index row = at.row > 0 ? static_cast<Index>(n) / at.row : 1;
      bias[n] =
          of.infinite && (random() % 5 == 0 || row % 7 == 0) ? -std::numeric_limits<float>::infinity() : normal(random);
      bias[n] = *of.bias == DType::f32   ? bias[n]
                : *of.bias == DType::f16 ? float_from_f16(f16_from_float(bias[n]))
                                         : float_from_bf16(bf16_from_float(bias[n]));
    }
  }
  void upload_options() {
    if (!slopes.empty()) {
      slopes_device = driver::DeviceBuffer(0, slopes.data(), slopes.size() * sizeof(float));
    }
    seed_device = driver::DeviceBuffer(0, &seed, sizeof seed);
    if (bias.empty()) {
      return;
    }
    std::vector<std::uint16_t> narrow;
    for (const float x : bias) {
      narrow.push_back(*sizes.options.bias == DType::f16 ? f16_from_float(x) : bf16_from_float(x));
    }
    const bool wide = *sizes.options.bias == DType::f32;
    bias_device = wide ? driver::DeviceBuffer(0, bias.data(), bias.size() * 4)
                       : driver::DeviceBuffer(0, narrow.data(), narrow.size() * 2);
  }
  /// NaN in keys and values that nothing uses.
  void spoil_unused() {
    for (Index j = 0; j < pattern.cols; ++j) {
      bool used = false;
      for (Index i = 0; i < pattern.rows && !used; ++i) {
        used = pattern.has(i, j);
      }
      for (Index b = 0; b < sizes.batch && !used; ++b) {
        for (Index h = 0; h < sizes.kv_heads; ++h) {
          std::fill_n(k.row(b, h, j), sizes.depth, kNan);
          std::fill_n(v.row(b, h, j), sizes.values(), kNan);
        }
      }
    }
  }
  /// NaN in queries that have no keys, and in `more`.
  void spoil_empty(FencedTensor& more) {
    for (Index i = 0; i < pattern.rows; ++i) {
      bool used = false;
      for (Index j = 0; j < pattern.cols && !used; ++j) {
        used = pattern.has(i, j);
      }
      for (Index b = 0; b < sizes.batch && !used; ++b) {
        for (Index h = 0; h < sizes.heads; ++h) {
          std::fill_n(q.row(b, h, i), sizes.depth, kNan);
          std::fill_n(more.row(b, h, i), more.size(3), kNan);
        }
      }
    }
  }
  void upload() {
    for (FencedTensor* t : {&q, &k, &v, &o}) {
      t->upload();
    }
    lse_device = driver::DeviceBuffer(0, lse.data(), lse.size() * sizeof(float));
    upload_options();
  }
  Problem problem() const {
    Problem p;
    p.dtype = sizes.dtype;
    p.batch = sizes.batch;
    p.heads = sizes.heads;
    p.kv_heads = sizes.kv_heads;
    p.rows = pattern.rows;
    p.cols = pattern.cols;
    p.depth = sizes.depth;
    p.value_depth = sizes.values();
    p.scale = sizes.scale;
    p.q = q.operand();
    p.k = k.operand();
    p.v = v.operand();
    p.o = o.operand();
    p.lse = {lse_device.data(), sizes.heads * pattern.rows, pattern.rows, 1, 1};
    p.softcap = sizes.options.softcap;
    p.bias = sizes.options.bias ? bias_at() : Bias{};
    p.slopes = slopes.empty() ? Operand{} : Operand{slopes_device.data(), 0, 1, 0, 0};
    if (sizes.options.dropout > 0) {
      p.dropout = {sizes.options.dropout, static_cast<const std::int64_t*>(seed_device.data())};
    }
    p.patterns = {patterns::full({pattern.rows, pattern.cols})};  // for rows of large scores, which there are none of
    return p;
  }
};

bool is_hopper() {
  return driver::available() && nvrtc::library().reason.empty() && driver::kernel_arch(0) == "sm_90a";
}

class AttentionHopper : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_hopper()) {
      GTEST_SKIP() << "no Hopper GPU: " << driver::unavailable_reason();
    }
  }
};
/// Columns of q and k, and of v; a test of each, because each has kernels to compile.
class AttentionHopperColumns : public AttentionHopper, public testing::WithParamInterface<std::pair<Index, Index>> {};
class AttentionHopperDeep : public AttentionHopperColumns {};

/// Rows to look at: the first and last ones, and some between.
std::set<Index> sampled(Index rows) {
  std::set<Index> some{0, 1, 63, 64, 127, 128, rows / 2, rows - 2, rows - 1};
  for (Index n = 5; n < rows; n += std::max<Index>(rows / 24, 1) + 1) {
    some.insert(n);
  }
  some.erase(some.lower_bound(rows), some.end());
  some.erase(some.begin(), some.lower_bound(0));
  return some;
}

struct Row {
  std::vector<Index> keys;
  std::vector<double> scores, slopes;  ///< of the softcap there
  std::vector<double> kept;            ///< what dropout multiplies a probability by
  double lse = -std::numeric_limits<double>::infinity();
};

/// Of a score that only the scale was applied to.
void add_score(const Data& s, Index b, Index h, Index i, Index j, double score, Row& row) {
  const Options& of = s.sizes.options;
  double slope = 1, kept = 1;
  if (of.softcap > 0) {
    const double t = std::tanh(score / of.softcap);
    score = of.softcap * t;
    slope = 1 - t * t;
  }
  if (of.bias) {
    score += s.bias_of(b, h, i, j);
  }
  if (of.alibi) {
    score -=
        s.slopes[static_cast<std::size_t>(h)] * static_cast<double>(std::abs(i + s.pattern.cols - s.pattern.rows - j));
  }
  if (of.dropout > 0) {
    const auto threshold = static_cast<unsigned>(of.dropout * 0x1p32);
    const unsigned bits = random_bits(random_row(s.seed, b * s.sizes.heads + h, i), j);
    kept = bits >= threshold ? 1 / (1 - of.dropout) : 0;
  }
  row.scores.push_back(score);
  row.slopes.push_back(slope);
  row.kept.push_back(kept);
}

Row row_of(Data& s, Index b, Index h, Index i) {
  Row row;
  const Index kv = h / (s.sizes.heads / s.sizes.kv_heads);
  const std::uint16_t* q = s.q.row(b, h, i);
  double most = row.lse, sum = 0;
  for (Index j = 0; j < s.pattern.cols; ++j) {
    if (s.pattern.has(i, j)) {
      const std::uint16_t* k = s.k.row(b, kv, j);
      double dot = 0;
      for (Index d = 0; d < s.sizes.depth; ++d) {
        dot += static_cast<double>(widen(s.sizes.dtype, q[d])) * widen(s.sizes.dtype, k[d]);
      }
      row.keys.push_back(j);
      add_score(s, b, h, i, j, dot * s.sizes.scale, row);
      most = std::max(most, row.scores.back());
    }
  }
  if (most == row.lse) {  // all are −∞
    return {};
  }
  for (const double score : row.scores) {
    sum += std::exp(score - most);
  }
  row.lse = row.keys.empty() ? row.lse : most + std::log(sum);
  return row;
}

void expect_forward(Data& s) {
  s.o.download();
  driver::copy_to_host(s.lse.data(), s.lse_device.data(), s.lse.size() * sizeof(float), nullptr);
  driver::synchronize(nullptr);
  const double tolerance = s.sizes.dtype == DType::f16 ? 0.004 : 0.025;
  double worst = 0, worst_lse = 0;
  for (Index b = 0; b < s.sizes.batch; ++b) {
    for (Index h = 0; h < s.sizes.heads; ++h) {
      const Index kv = h / (s.sizes.heads / s.sizes.kv_heads);
      for (const Index i : sampled(s.pattern.rows)) {
        const Row row = row_of(s, b, h, i);
        const float lse = s.lse[static_cast<std::size_t>((b * s.sizes.heads + h) * s.pattern.rows + i)];
        if (row.keys.empty()) {
          ASSERT_EQ(lse, -std::numeric_limits<float>::infinity()) << s.pattern.name << " row " << i;
        } else {
          ASSERT_NEAR(lse, row.lse, 2e-3) << s.pattern.name << " batch " << b << " head " << h << " row " << i;
          worst_lse = std::max(worst_lse, std::abs(lse - row.lse));
        }
        for (Index d = 0; d < s.sizes.values(); ++d) {
          double want = 0;
          for (std::size_t n = 0; n < row.keys.size(); ++n) {
            want +=
                std::exp(row.scores[n] - row.lse) * row.kept[n] * widen(s.sizes.dtype, s.v.row(b, kv, row.keys[n])[d]);
          }
          const float got = widen(s.sizes.dtype, s.o.row(b, h, i)[d]);
          ASSERT_NEAR(got, want, tolerance)
              << s.pattern.name << " batch " << b << " head " << h << " row " << i << " column " << d;
          worst = std::max(worst, std::abs(got - want));
        }
      }
    }
  }
  std::printf("%-14s rows %5lld cols %5lld depth %3lld: o %.5f lse %.6f\n", s.pattern.name.c_str(),
              static_cast<long long>(s.pattern.rows), static_cast<long long>(s.pattern.cols),
              static_cast<long long>(s.sizes.depth), worst, worst_lse);
}

/// Row tiles of more than `longest` steps are cut, where it is not 0, and `pack` heads share a tile.
void check_forward(const Pattern& pattern, const Sizes& sizes, bool spoil = false, int longest = 0, int pack = 1) {
  Data s(pattern, sizes);
  if (spoil) {
    s.spoil_unused();
  }
  s.upload();
  Context context = Context::cuda(0);
  const driver::DeviceScope scope(0);
  TileShape shape = hopper::forward_shape(s.problem());
  shape.rows /= pack;
  Planner planner(pattern, shape);
  planner.mark_unused();
  ASSERT_TRUE(hopper::launch(s.problem(), {planner.get()}, context, longest));
  expect_forward(s);
}

std::vector<Pattern> patterns() {
  return {full(512, 512),
          full(300, 700),
          causal(1000),
          window(1111, 200),
          dilated(2048, 4, 100),
          dilated(1501, 4, 60),
          dilated(777, 3, 300),
          strided(2048, 128),
          strided(1900, 64),
          strided(1030, 100),
          neighbourhood(32, 32, 13, 8, 16),
          neighbourhood(37, 45, 7, 8, 16),
          neighbourhood(33, 29, 9, 11, 11),
          documents({100, 300, 17, 1, 260, 500}),
          longformer(1024, 100, 64),
          full(1, 1),
          causal(64)};
}

// ---------------------------------------------------------------------------------------------------- gradients

/// What the backward pass is given and gives beside Data.
struct Gradients {
  FencedTensor d_o, d_q, d_k, d_v;
  std::vector<float> d_lse;
  driver::DeviceBuffer d_lse_device;

  Gradients(const Data& data, bool with_lse)
      : d_o(data.o.like()), d_q(data.q.like()), d_k(data.k.like()), d_v(data.v.like()), d_lse(data.lse.size()) {
    d_o.randomise(4);
    for (std::size_t n = 0; n < d_lse.size() && with_lse; ++n) {
      d_lse[n] = std::sin(static_cast<float>(n));
    }
  }
  void upload() {
    for (FencedTensor* t : {&d_o, &d_q, &d_k, &d_v}) {
      t->upload();
    }
    d_lse_device = driver::DeviceBuffer(0, d_lse.data(), d_lse.size() * sizeof(float));
  }
  BackwardProblem problem(const Data& data) const {
    BackwardProblem b;
    b.forward = data.problem();
    b.d_o = d_o.operand();
    b.d_lse = b.forward.lse;
    b.d_lse.data = d_lse_device.data();
    b.d_q = d_q.operand();
    b.d_k = d_k.operand();
    b.d_v = d_v.operand();
    return b;
  }
};

double dot(DType dtype, const std::uint16_t* a, const std::uint16_t* b, Index depth) {
  double sum = 0;
  for (Index d = 0; d < depth; ++d) {
    sum += static_cast<double>(widen(dtype, a[d])) * widen(dtype, b[d]);
  }
  return sum;
}

/// Gradients of one batch and key head, all rows of them.
struct WantedGradients {
  std::vector<double> d_q, d_k, d_v;  ///< d_q of all heads that share the keys

  WantedGradients(Data& s, Gradients& g, Index b, Index kv) {
    const Index depth = s.sizes.depth, values = s.sizes.values(), group = s.sizes.heads / s.sizes.kv_heads,
                rows = s.pattern.rows;
    const auto size = [](Index n) { return static_cast<std::size_t>(n); };
    d_q.resize(size(group * rows * depth));
    d_k.resize(size(s.pattern.cols * depth));
    d_v.resize(size(s.pattern.cols * values));
    for (Index h = kv * group; h < (kv + 1) * group; ++h) {
      for (Index i = 0; i < rows; ++i) {
        const Row row = row_of(s, b, h, i);
        std::vector<double> p, dp;
        double delta = -g.d_lse[size((b * s.sizes.heads + h) * rows + i)];
        for (std::size_t n = 0; n < row.keys.size(); ++n) {
          p.push_back(std::exp(row.scores[n] - row.lse));
          dp.push_back(row.kept[n] * dot(s.sizes.dtype, g.d_o.row(b, h, i), s.v.row(b, kv, row.keys[n]), values));
          delta += p[n] * dp[n];
        }
        for (std::size_t n = 0; n < row.keys.size(); ++n) {
          const double ds = p[n] * (dp[n] - delta) * row.slopes[n] * s.sizes.scale;
          const Index j = row.keys[n];
          for (Index d = 0; d < depth; ++d) {
            d_q[size(((h - kv * group) * rows + i) * depth + d)] += ds * widen(s.sizes.dtype, s.k.row(b, kv, j)[d]);
            d_k[size(j * depth + d)] += ds * widen(s.sizes.dtype, s.q.row(b, h, i)[d]);
          }
          for (Index d = 0; d < values; ++d) {
            d_v[size(j * values + d)] += p[n] * row.kept[n] * widen(s.sizes.dtype, g.d_o.row(b, h, i)[d]);
          }
        }
      }
    }
  }
};

/// Largest error relative to the largest number.
double expect_rows(const char* what, FencedTensor& got, Index b, Index h, const double* want, DType dtype,
                   double tolerance) {
  double most = 1e-3, worst = 0;
  for (Index n = 0; n < got.size(2) * got.size(3); ++n) {
    most = std::max(most, std::abs(want[n]));
  }
  for (Index i = 0; i < got.size(2); ++i) {
    for (Index d = 0; d < got.size(3); ++d) {
      const double error = std::abs(widen(dtype, got.row(b, h, i)[d]) - want[i * got.size(3) + d]);
      if (!(error <= tolerance * most)) {
        ADD_FAILURE() << what << " batch " << b << " head " << h << " row " << i << " column " << d << ": "
                      << widen(dtype, got.row(b, h, i)[d]) << ", expected " << want[i * got.size(3) + d];
        return error;
      }
      worst = std::max(worst, error / most);
    }
  }
  return worst;
}

bool backward(const BackwardProblem& problem, const Plans& rows, const Plans& cols, Context& context, int longest = 0,
              bool five_product = false) {
  return five_product ? hopper::launch_five_product(problem, {rows, cols}, context)
                      : hopper::launch(problem, {rows, cols}, context, longest);
}

void check_backward(const Pattern& pattern, const Sizes& sizes, bool spoil = false, int longest = 0,
                    bool five_product = false) {
  Data s(pattern, sizes);
  Gradients g(s, !spoil);
  if (spoil) {
    s.spoil_unused();
    s.spoil_empty(g.d_o);
  }
  s.upload();
  g.upload();
  Context context = Context::cuda(0);
  const driver::DeviceScope scope(0);
  const Pattern other = pattern.transposed();
  const auto plan = Planner(pattern, hopper::forward_shape(s.problem())).mark_unused().get();
  const auto rows = Planner(pattern, hopper::kBackwardShape).mark_unused().get();
  const auto cols = Planner(other, hopper::kBackwardShape).mark_unused().get();
  ASSERT_TRUE(hopper::launch(s.problem(), {plan}, context));
  ASSERT_TRUE(backward(g.problem(s), {rows}, {cols}, context, longest, five_product));
  for (FencedTensor* t : {&g.d_q, &g.d_k, &g.d_v}) {
    t->download();
  }
  const double tolerance = sizes.dtype == DType::f16 ? 0.004 : 0.02;
  const Index group = sizes.heads / sizes.kv_heads;
  double worst[3] = {0, 0, 0};
  for (Index b = 0; b < sizes.batch; ++b) {
    for (Index kv = 0; kv < sizes.kv_heads; ++kv) {
      const WantedGradients want(s, g, b, kv);
      worst[1] = std::max(worst[1], expect_rows("d_k", g.d_k, b, kv, want.d_k.data(), sizes.dtype, tolerance));
      worst[2] = std::max(worst[2], expect_rows("d_v", g.d_v, b, kv, want.d_v.data(), sizes.dtype, tolerance));
      for (Index h = 0; h < group; ++h) {
        worst[0] =
            std::max(worst[0], expect_rows("d_q", g.d_q, b, kv * group + h,
                                           want.d_q.data() + h * pattern.rows * sizes.depth, sizes.dtype, tolerance));
      }
    }
  }
  std::printf("%-14s rows %5lld cols %5lld depth %3lld: d_q %.5f d_k %.5f d_v %.5f\n", pattern.name.c_str(),
              static_cast<long long>(pattern.rows), static_cast<long long>(pattern.cols),
              static_cast<long long>(sizes.depth), worst[0], worst[1], worst[2]);
  ASSERT_FALSE(testing::Test::HasFailure()) << pattern.name;
}

// ------------------------------------------------------------------------------------------------------- tests

TEST_F(AttentionHopper, ForwardAgreesWithFloat64) {
  for (const Pattern& pattern : patterns()) {
    check_forward(pattern, {});
  }
}

TEST_F(AttentionHopper, ForwardOfEveryKind) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Index depth : {64, 128}) {
      for (const bool tokens_first : {false, true}) {
        check_forward(causal(700), {dtype, 2, 4, 2, depth, tokens_first, 0.125});
        check_forward(strided(900, 64), {dtype, 2, 6, 1, depth, tokens_first, 0.125});
      }
    }
  }
}

/// Depths that kernels have no instance of: the copy engine supplies zeros, and nothing beyond them is written.
TEST_F(AttentionHopper, DepthsMayBeAny) {
  for (const auto& [depth, values] :
       {std::pair<Index, Index>{96, 96}, {80, 80}, {40, 40}, {128, 64}, {64, 128}, {48, 104}}) {
    for (const bool tokens_first : {false, true}) {
      const Sizes sizes{DType::bf16, 1, 3, 3, depth, tokens_first, 0.1, values};
      check_forward(causal(300), sizes);
      check_forward(strided(500, 64), sizes);
      check_backward(causal(300), sizes);
      check_backward(strided(500, 64), sizes);
    }
  }
}

TEST_F(AttentionHopper, DeepForward) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const auto& [depth, values] :
         {std::pair<Index, Index>{192, 128}, {192, 192}, {256, 256}, {160, 224}, {64, 256}, {256, 64}, {96, 136}}) {
      for (const Pattern& pattern : {causal(700), strided(900, 64), longformer(600, 100, 30), full(300, 1)}) {
        check_forward(pattern, {dtype, 2, 4, 2, depth, depth == values, 0.05, values});
      }
      check_forward(one_class(600, 4, 1), {dtype, 1, 2, 2, depth, false, 0.05, values}, true);
    }
  }
}

/// Maps of the copy engine may begin before an operand, and tiles reach beyond one; neither may be touched there.
TEST_P(AttentionHopperColumns, NothingBesideOperandsIsTouched) {
  const driver::DeviceScope scope(0);  // outlives the tensors
  const auto [depth, values] = GetParam();
  for (const Place where : {Place::behind_hole, Place::before_hole}) {
    place = where;
    for (const bool tokens_first : {false, true}) {
      const Sizes sizes{DType::bf16, 2, 4, 2, depth, tokens_first, 0.05, values};
      for (const Pattern& pattern : {causal(700), strided(900, 64), dilated(777, 3, 300)}) {
        check_forward(pattern, sizes);
      }
      for (const Pattern& pattern : {causal(300), strided(500, 64), dilated(333, 3, 60)}) {
        check_backward(pattern, sizes);
      }
    }
  }
  place = Place::anywhere;
}
INSTANTIATE_TEST_SUITE_P(Columns, AttentionHopperColumns,
                         testing::ValuesIn(std::vector<std::pair<Index, Index>>{
                             {128, 128}, {64, 64}, {64, 128}, {40, 72}, {160, 224}, {192, 128}, {256, 256}}));

/// Queries are few and late, so that most keys are used by none.
Pattern late_window() { return {"late window", 64, 640, {{band(400, 500)}}}; }

TEST_F(AttentionHopper, UnusedKeysMayBeNan) {
  check_forward(one_class(600, 4, 1), {}, true);
  check_forward(late_window(), {}, true);
}

TEST_F(AttentionHopper, BackwardAgreesWithFloat64) {
  for (const Pattern& pattern : patterns()) {
    check_backward(pattern, {DType::bf16, 1, 1, 1, 128, false, 0.1});
  }
}

TEST_F(AttentionHopper, BackwardOfEveryKind) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Index depth : {64, 128}) {
      for (const bool tokens_first : {false, true}) {
        check_backward(causal(300), {dtype, 2, 4, 2, depth, tokens_first, 0.125});
        check_backward(strided(500, 64), {dtype, 1, 3, 1, depth, tokens_first, 0.125});
      }
    }
  }
}

/// Few keys meet all queries, so that the gradient of queries, which may start before that of keys has ended, takes a
/// tenth of its time; still no one may see keys that are not done.
TEST_F(AttentionHopper, KeysAreDoneWhenQueriesAre) {
  for (int n = 0; n < 3; ++n) {
    check_backward(full(4096, 64), {DType::bf16, 1, 1, 1, 128, false, 0.1});
    check_backward(full(4096, 64), {DType::bf16, 1, 1, 1, 192, false, 0.1});
  }
  for (const Index depth : {128, 256}) {
    check_backward({"few rows", 2048, 192, {{[](Index i, Index j) { return j < 32 && i >= 100; }}}},
                   {DType::bf16, 1, 2, 1, depth, false, 0.1});
  }
}

/// Above 128 columns keys and values have a kernel each; columns of both are counted in 64s, each for itself.
TEST_P(AttentionHopperDeep, Backward) {
  const auto [depth, values] = GetParam();
  const Sizes sizes{depth == 192 ? DType::f16 : DType::bf16, 1, 4, 2, depth, depth != values, 0.05, values};
  for (const Pattern& pattern : {full(200, 70), causal(300), strided(500, 64), longformer(400, 60, 20),
                                 neighbourhood(16, 20, 5, 8, 16), documents({100, 1, 63, 200})}) {
    check_backward(pattern, sizes);
  }
  check_backward(one_class(400, 4, 1), sizes, true);
  check_backward(late_window(), sizes, true);
  if (depth == values) {  // rings go round many times, over several items
    check_backward(causal(1100), {DType::bf16, 1, 1, 1, depth, false, 0.05});
    check_backward(full(64, 1500), {DType::bf16, 1, 2, 1, depth, false, 0.05});
  }
}
INSTANTIATE_TEST_SUITE_P(Columns, AttentionHopperDeep,
                         testing::ValuesIn(std::vector<std::pair<Index, Index>>{
                             {256, 256}, {192, 192}, {192, 128}, {160, 224}, {64, 256}, {256, 64}, {96, 136}}));

/// More items than CTAs, and nothing between one call and the next.
TEST_F(AttentionHopper, DeepBackwardRepeatsBitForBit) {
  for (const auto& [depth, values] : {std::pair<Index, Index>{256, 256}, {192, 128}}) {
    Data s(strided(2048, 128), {DType::bf16, 1, 16, 16, depth, false, 0.05, values});
    Gradients g(s, true);
    s.upload();
    g.upload();
    Context context = Context::cuda(0);
    const driver::DeviceScope scope(0);
    const Pattern other = s.pattern.transposed();
    ASSERT_TRUE(hopper::launch(s.problem(), {Planner(s.pattern, hopper::forward_shape(s.problem())).get()}, context));
    const Plans rows{Planner(s.pattern, hopper::kBackwardShape).get()};
    const Plans cols{Planner(other, hopper::kBackwardShape).get()};
    const auto gradients = [&](int times) {
      for (int n = 0; n < times; ++n) {
        EXPECT_TRUE(backward(g.problem(s), rows, cols, context));
      }
      for (FencedTensor* t : {&g.d_q, &g.d_k, &g.d_v}) {
        t->download();
      }
      return std::array{g.d_q.storage(), g.d_k.storage(), g.d_v.storage()};
    };
    EXPECT_TRUE(gradients(1) == gradients(100));
  }
}

TEST_F(AttentionHopper, UnusedRowsMayBeNanInBackward) {
  check_backward(one_class(600, 4, 1), {}, true);
  check_backward(late_window(), {}, true);
}

/// Pieces begin and end within runs and, where heads share keys, within the queries of any head; later components join
/// what earlier ones gave.
TEST_F(AttentionHopper, TilesMayBeCut) {
  for (const Pattern& pattern : patterns()) {
    check_forward(pattern, {}, false, 3);
  }
  for (const int longest : {1, 3}) {
    for (const Pattern& pattern : {causal(300), strided(400, 64), longformer(400, 60, 20), documents({100, 1, 263})}) {
      for (const Index depth : {64, 128, 256}) {
        const Sizes sizes{depth == 64 ? DType::f16 : DType::bf16, 1, 2, 1, depth, depth > 64, 0.1};
        check_forward(pattern, sizes, false, longest);
        check_backward(pattern, sizes, false, longest);
      }
    }
    check_forward(one_class(600, 4, 1), {}, true, longest);
    check_backward(one_class(300, 4, 1), {}, true, longest);
    check_forward(late_window(), {}, true, longest);
    check_backward(late_window(), {}, true, longest);
  }
}

/// Few rows against many keys: the schedule cuts by itself.
TEST_F(AttentionHopper, LongRowsAreCut) {
  for (const Pattern& pattern : {full(60, 5000), causal(2600)}) {
    check_forward(pattern, {DType::bf16, 1, 2, 1, 128, true, 0.1});
  }
  check_backward(full(60, 3000), {DType::bf16, 1, 2, 1, 128, true, 0.1});
  check_backward(full(3000, 60), {DType::bf16, 1, 2, 1, 64, true, 0.1});
}

/// Heads that share keys fill a tile together; their tiles may be cut as well, and may be many.
TEST_F(AttentionHopper, HeadsMayShareTiles) {
  for (const int pack : {2, 4, 8}) {
    const Index rows = 128 / pack;
    for (const int longest : {0, 1}) {
      for (const bool tokens_first : {false, true}) {
        const Sizes sizes{DType::bf16, 2, 16, 2, 128, tokens_first, 0.1};
        for (const Index some : {rows, rows - 3, rows / 2 + 1, 3 * rows + 1}) {
          const Index first = 300 - some;
          check_forward({"late causal", some, 300, {{band(-1000, first)}}}, sizes, false, longest, pack);
        }
        check_forward(strided(200, 16), {DType::f16, 1, 8, 1, 64, tokens_first, 0.1, 128}, false, longest, pack);
        check_forward(neighbourhood(16, 20, 5, rows / 4, 4), {DType::bf16, 1, 8, 1, 192, tokens_first, 0.1}, false,
                      longest, pack);
        check_forward(late_window(), sizes, true, longest, pack);
      }
    }
  }
}

/// Kernels for 64 columns have steps of their own: one, two or many, whole or masked, with keys that nothing uses, and
/// in pieces.
TEST_F(AttentionHopper, SixtyFourColumns) {
  const Sizes sizes{DType::bf16, 1, 2, 1, 64, false, 0.1};
  for (const Index cols : {1, 64, 65, 128, 129, 300, 1000}) {
    check_forward(full(70, cols), sizes);
    check_backward(full(70, cols), sizes);
  }
  for (const Pattern& pattern : patterns()) {
    check_forward(pattern, sizes);
    check_backward(pattern, {DType::f16, 1, 1, 1, 64, true, 0.1});
  }
  for (const int longest : {0, 1, 3}) {
    for (const Pattern& pattern : {one_class(300, 4, 1), late_window()}) {
      check_forward(pattern, sizes, true, longest);
      check_backward(pattern, sizes, true, longest);
    }
    check_forward(late_window(), {DType::bf16, 2, 16, 2, 64, true, 0.1}, true, longest, 4);
  }
}

/// Where queries meet every key, or all up to their own, one kernel makes all gradients: one key tile and many, more
/// queries than keys, heads that share keys.
TEST_F(AttentionHopper, FiveProductBackward) {
  const auto check = [](const Pattern& pattern, const Sizes& sizes) { check_backward(pattern, sizes, false, 0, true); };
  for (const Index depth : {64, 128}) {
    check(full(128, 128), {DType::bf16, 1, 1, 1, depth, false, 0.1});
    check(full(512, 512), {DType::bf16, 1, 1, 1, depth, true, 0.1});
    check(full(640, 128), {DType::bf16, 1, 3, 1, depth, false, 0.1});
    check(causal(128), {DType::bf16, 1, 1, 1, depth, false, 0.1});
    check(causal(512), {DType::bf16, 1, 1, 1, depth, true, 0.1});
    for (const Index shift : {0, 64, 200}) {
      check({"shifted causal", 384, 256, {{band(-1000, shift)}}}, {DType::bf16, 1, 2, 1, depth, true, 0.1});
    }
    for (const Pattern& pattern : {full(384, 256), causal(256)}) {
      check(pattern, {DType::f16, 2, 4, 2, depth == 64 ? 40 : 72, false, 0.1});
    }
  }
  check(full(64 * 7, 128 * 3), {DType::bf16, 1, 1, 1, 64, false, 0.1, 48});
}

std::vector<std::pair<const char*, Options>> options(DType own) {
  return {{"bias", {.bias = own}},
          {"bias, shared, f32", {.bias = DType::f32, .batches = false, .heads = false}},
          {"bias, −inf", {.bias = own, .gap = 4, .infinite = true}},
          {"bias of keys", {.bias = own, .heads = false, .rows = false}},
          {"bias of queries", {.bias = own, .batches = false, .cols = false}},
          {"bias in odd rows", {.bias = DType::f16, .gap = 3}},
          {"alibi", {.alibi = true}},
          {"softcap", {.softcap = 2}},
          {"dropout", {.dropout = 0.3}},
          {"bias, softcap", {.bias = own, .softcap = 2}},
          {"alibi, softcap", {.alibi = true, .softcap = 2}},
          {"all", {.bias = DType::f32, .infinite = true, .alibi = true, .softcap = 2, .dropout = 0.2}}};
}

/// One score stage in all kernels: patterns in any order of tokens, in one component or several, in pieces.
class AttentionHopperOptions : public AttentionHopper, public testing::WithParamInterface<int> {
 protected:
  static Sizes with(const Options& options, Index depth, DType dtype = DType::bf16) {
    return {dtype, 2, 4, 2, depth, false, 0.1, 0, options};
  }
};
TEST_P(AttentionHopperOptions, Forward) {
  const auto [name, of] = options(DType::bf16)[static_cast<std::size_t>(GetParam())];
  SCOPED_TRACE(name);
  for (const Pattern& pattern : patterns()) {
    check_forward(pattern, with(of, 128));
  }
  for (const Pattern& pattern : {causal(300), strided(500, 64), late_window()}) {
    check_forward(pattern, with(of, 64));
    check_forward(pattern, with(of, 128), false, 1);
  }
  check_forward(one_class(600, 4, 1), with(of, 128), true);
  check_forward(late_window(), with(of, 72), true);
  check_forward({"late causal", 30, 300, {{band(-1000, 270)}}}, {DType::bf16, 2, 16, 2, 128, false, 0.1, 0, of}, false,
                0, 4);
}
TEST_P(AttentionHopperOptions, Backward) {
  const auto [name, of] = options(DType::bf16)[static_cast<std::size_t>(GetParam())];
  SCOPED_TRACE(name);
  for (const Pattern& pattern :
       {full(300, 130), causal(300), window(333, 60), dilated(400, 4, 30), strided(500, 64),
        neighbourhood(16, 20, 5, 8, 16), documents({100, 1, 63, 200}), longformer(400, 60, 20)}) {
    check_backward(pattern, with(of, 128));
  }
  check_backward(strided(500, 64), with(of, 64));
  check_backward(causal(300), with(of, 128), false, 1);
  check_backward(one_class(400, 4, 1), with(of, 128), true);
  check_backward(late_window(), with(of, 128), true);
}
TEST_P(AttentionHopperOptions, FiveProducts) {
  auto [name, of] = options(DType::bf16)[static_cast<std::size_t>(GetParam())];
  SCOPED_TRACE(name);
  if (!of.cols || of.gap % 2 != 0) {
    GTEST_SKIP() << "seven products";
  }
  of.gap *= 2;  // rows begin at multiples of 16 bytes
  for (const Index depth : {64, 128}) {
    check_backward(full(512, 256), with(of, depth), false, 0, true);
    check_backward(causal(512), with(of, depth), false, 0, true);
  }
}
TEST_P(AttentionHopperOptions, HalfPrecision) {
  const auto [name, of] = options(DType::f16)[static_cast<std::size_t>(GetParam())];
  SCOPED_TRACE(name);
  check_forward(causal(700), with(of, 128, DType::f16));
  check_backward(causal(200), with(of, 128, DType::f16));
}
INSTANTIATE_TEST_SUITE_P(All, AttentionHopperOptions, testing::Range(0, static_cast<int>(options(DType::bf16).size())));

/// More items than CTAs, and nothing between one call and the next. Both ways agree; bit for bit each only with itself.
TEST_F(AttentionHopper, FiveProductBackwardRepeatsBitForBit) {
  for (const Pattern& pattern : {full(1024, 1024), causal(1024)}) {
    for (const Index depth : {64, 128}) {
      Data s(pattern, {DType::bf16, 1, 40, 20, depth, false, 0.05});
      Gradients g(s, true);
      s.upload();
      g.upload();
      Context context = Context::cuda(0);
      const driver::DeviceScope scope(0);
      ASSERT_TRUE(hopper::launch(s.problem(), {Planner(s.pattern, hopper::forward_shape(s.problem())).get()}, context));
      const Plans rows{Planner(pattern, hopper::kBackwardShape).get()};
      const Pattern other = pattern.transposed();
      const Plans cols{Planner(other, hopper::kBackwardShape).get()};
      const auto gradients = [&](int times, bool five_product) {
        for (int n = 0; n < times; ++n) {
          EXPECT_TRUE(backward(g.problem(s), rows, cols, context, 0, five_product));
        }
        for (FencedTensor* t : {&g.d_q, &g.d_k, &g.d_v}) {
          t->download();
        }
        return std::array{g.d_q.storage(), g.d_k.storage(), g.d_v.storage()};
      };
      const auto values = [&] { return std::array{g.d_q.values(), g.d_k.values(), g.d_v.values()}; };
      const auto first = gradients(1, true);
      EXPECT_TRUE(first == gradients(200, true));
      const auto whole = values();
      gradients(1, false);
      const auto apart = values();
      for (std::size_t which = 0; which < 3; ++which) {
        double most = 0, worst = 0;
        for (std::size_t n = 0; n < whole[which].size(); ++n) {
          const double one = whole[which][n], two = apart[which][n];
          most = std::max(most, std::abs(two));
          worst = std::max(worst, std::abs(one - two));
        }
        EXPECT_LE(worst, 0.02 * most) << which;
      }
    }
  }
}

/// Patterns and sizes that those kernels are not for.
TEST_F(AttentionHopper, NotWhole) {
  const auto refused = [](const Pattern& pattern, const Sizes& sizes) {
    Data s(pattern, sizes);
    Gradients g(s, true);
    s.upload();
    g.upload();
    Context context = Context::cuda(0);
    const driver::DeviceScope scope(0);
    const Plans rows{Planner(pattern, hopper::kBackwardShape).get()};
    const Plans cols{Planner(pattern.transposed(), hopper::kBackwardShape).get()};
    return !backward(g.problem(s), rows, cols, context, 0, true);
  };
  for (const Index depth : {64, 128}) {
    EXPECT_FALSE(refused(full(512, 512), {DType::bf16, 1, 2, 1, depth, false, 0.1}));
    EXPECT_FALSE(refused(causal(512), {DType::bf16, 1, 2, 1, depth, false, 0.1}));
  }
  EXPECT_TRUE(refused(causal(300), {}));
  EXPECT_TRUE(refused(window(256, 40), {}));
  EXPECT_TRUE(refused(full(256, 200), {}));
  EXPECT_TRUE(refused(full(200, 128), {}));
  EXPECT_TRUE(refused(full(128, 256), {}));
  EXPECT_TRUE(refused(documents({128, 128}), {}));
  EXPECT_TRUE(refused(full(256, 256), {DType::bf16, 1, 1, 1, 64, false, 0.1, 128}));
  EXPECT_TRUE(refused(full(256, 256), {DType::bf16, 1, 1, 1, 192, false, 0.1}));
}

TEST_F(AttentionHopper, HeadsMayDiffer) {
  const Pattern one = causal(500), two = window(500, 40);
  Data s(one, {DType::bf16, 2, 4, 2, 128, false, 0.1});
  s.upload();
  Context context = Context::cuda(0);
  const driver::DeviceScope scope(0);
  const auto a = Planner(one, hopper::forward_shape(s.problem())).get(),
             b = Planner(two, hopper::forward_shape(s.problem())).get();
  ASSERT_TRUE(hopper::launch(s.problem(), {a, b, b, a}, context));
  Predicate which[] = {one.layers[0].has, two.layers[0].has};
  Data reference(one, s.sizes);
  s.o.download();
  for (Index h = 0; h < 4; ++h) {
    reference.pattern.layers[0].has = which[h == 1 || h == 2 ? 1 : 0];
    for (const Index i : sampled(500)) {
      const Row row = row_of(reference, 1, h, i);
      for (const Index d : {0, 77}) {
        double want = 0;
        for (std::size_t n = 0; n < row.keys.size(); ++n) {
          want += std::exp(row.scores[n] - row.lse) * widen(DType::bf16, reference.v.row(1, h / 2, row.keys[n])[d]);
        }
        ASSERT_NEAR(widen(DType::bf16, s.o.row(1, h, i)[d]), want, 0.025) << "head " << h << " row " << i;
      }
    }
  }
}

void check_repeats(Index depth) {
  Data s(strided(2048, 128), {DType::bf16, 1, 16, 16, depth, false, 0.1});
  s.upload();
  Context context = Context::cuda(0);
  const driver::DeviceScope scope(0);
  const Plans plans{Planner(s.pattern, hopper::forward_shape(s.problem())).get()};
  ASSERT_TRUE(hopper::launch(s.problem(), plans, context));
  s.o.download();
  const auto first = s.o.storage();
  for (int n = 0; n < 200; ++n) {
    ASSERT_TRUE(hopper::launch(s.problem(), plans, context));
  }
  s.o.download();
  EXPECT_TRUE(first == s.o.storage());
  Gradients g(s, true);
  g.upload();
  const Pattern other = s.pattern.transposed();
  const Plans rows{Planner(s.pattern, hopper::kBackwardShape).get()};
  const Plans cols{Planner(other, hopper::kBackwardShape).get()};
  for (const int longest : {0, 3}) {
    ASSERT_TRUE(backward(g.problem(s), rows, cols, context, longest));
    g.d_k.download();
    const auto keys = g.d_k.storage();
    for (int n = 0; n < 100; ++n) {
      ASSERT_TRUE(backward(g.problem(s), rows, cols, context, longest));
    }
    g.d_k.download();
    EXPECT_TRUE(keys == g.d_k.storage());
  }
  ASSERT_TRUE(hopper::launch(s.problem(), plans, context, 1));
  s.o.download();
  const auto cut = s.o.storage();
  for (int n = 0; n < 100; ++n) {
    ASSERT_TRUE(hopper::launch(s.problem(), plans, context, 1));
  }
  s.o.download();
  EXPECT_TRUE(cut == s.o.storage());
}
TEST_F(AttentionHopper, RepeatsBitForBit) {
  check_repeats(64);
  check_repeats(128);
}

// ------------------------------------------------------------------------------------------------------- times

/// Patterns as the planner sees them.
std::vector<std::pair<std::string, RegularPtr>> known_patterns(Index s) {
  const Index grid[] = {128, 128}, side[] = {13}, one[] = {1}, zero[] = {0};
  std::vector<Index> globals(64);
  std::iota(globals.begin(), globals.end(), 0);
  return {{"full", patterns::full(s)},
          {"causal", patterns::causal(s)},
          {"window", patterns::sliding_window(s, 512, 512)},
          {"block local", patterns::block_local(s, 1024)},
          {"longformer", patterns::longformer(s, 512, globals)},
          {"sinks", patterns::sinks(s, 64, 1024)},
          {"bigbird", patterns::bigbird(s, 64, 1, 1, 3, 0)},
          {"fixed", patterns::fixed(s, 128, 8)},
          {"dilated", patterns::dilated(s, 512, 4)},
          {"strided", patterns::strided(s, 128)},
          {"neighbourhood", patterns::neighborhood(grid, side, one, zero)}};
}

/// What the plans of known patterns are made of, on any machine.
TEST(AttentionHopperPlans, AreListed) {
  for (const auto& [name, pattern] : known_patterns(16384)) {
    for (const TileShape& shape : {TileShape{128, 128}, hopper::kBackwardShape}) {
      const auto made = plan(*pattern, shape);
      std::printf("%-14s %d x %d: %zu masks of bits,", name.c_str(), shape.rows, shape.cols,
                  made->bits.size() * 32 / static_cast<std::size_t>(shape.rows * shape.cols));
      for (const Component& c : made->components) {
        std::printf(" [%zu tiles of %dx%dx%d, %zu of %dx%dx%d, %zu runs, %lld pairs%s]", c.row_tiles.size(),
                    c.row_order.extent[0], c.row_order.extent[1], c.row_order.extent[2], c.col_tiles.size(),
                    c.col_order.extent[0], c.col_order.extent[1], c.col_order.extent[2], c.runs.size(),
                    static_cast<long long>(c.pairs), c.covers_rows ? "" : ", some rows");
      }
      std::printf("\n");
      EXPECT_FALSE(made->components.empty());
    }
  }
}

}  // namespace
}  // namespace fretwork::attention_op
