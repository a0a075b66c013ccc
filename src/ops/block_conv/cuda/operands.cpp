// Copies of operands that TMA cannot read, TMA maps, and residue classes of output positions.
#include "ops/block_conv/cuda/operands.h"

#include <algorithm>
#include <bit>

#include "ops/block_conv/cuda/params.h"
#include "runtime/alignment.h"

namespace fretwork::block_conv::hopper {
namespace {

namespace driver = fretwork::cuda;
using namespace blocks;  // NOLINT: the host side that it shares with the block products

constexpr std::int64_t kUnit = 8;  ///< 16-bit elements in 16 bytes
constexpr const char* kFile = "ops/block_conv/cuda/generic.cuh";

bool whole(std::int64_t stride) { return stride % kUnit == 0; }
/// Whether the stride of a dimension is a positive multiple of 16 bytes. The stride of a dimension of size 1 is not
/// used.
bool units(std::int64_t size, std::int64_t stride) { return size == 1 || (stride > 0 && whole(stride)); }

std::optional<View> view_of(const Problem& p, const Values& v) {
  const std::int64_t block = p.layout->sizes().block_rows;
  return make_view(v.data, block, block, p.transposed ? v.col_stride : v.row_stride,
                   p.transposed ? v.row_stride : v.col_stride, {p.layout->nnz(), 1}, {v.block_stride, 0});
}

}  // namespace

KernelSpec turn_instance() { return {kFile, "fretwork::block_conv::to_channels_last", 0}; }
KernelSpec pack_instance() { return {kFile, "fretwork::block_conv::pack_blocks", 0}; }

bool channels_last(const Image& i) {
  return i.c_stride == 1 && units(i.n, i.n_stride) && units(i.h, i.h_stride) && units(i.w, i.w_stride) &&
         is_aligned(i.data, 16);
}
bool pixels_last(const Image& i) {
  return i.w_stride == 1 && (i.h == 1 || i.h_stride == i.w) && units(i.c, i.c_stride) && units(i.n, i.n_stride) &&
         is_aligned(i.data, 16);
}
std::optional<TiledView> lines_of(const Image& i) {
  return pixels_last(i) ? make_tiled_view(i.data, {i.h * i.w, i.c, i.n, 1}, {1, i.c_stride, i.n_stride, 0})
                        : std::nullopt;
}
bool one_line(const Image& i) {
  return (i.h == 1 || i.h_stride == i.w * i.w_stride) && (i.n == 1 || i.n_stride == i.h * i.w * i.w_stride);
}

ChannelsLast::ChannelsLast(const Image& from, bool dense, Context& context)
    : image_(from),
      space_(context, channels_last(from) && (!dense || one_line(from))
                          ? 0
                          : static_cast<std::size_t>(from.pixels() * from.c) * sizeof(std::uint16_t)) {
  if (space_.data() == nullptr) {
    return;
  }
  const bool lines = from.w_stride == 1 && from.h_stride == from.w && whole(from.h * from.w) && whole(from.n_stride) &&
                     whole(from.c_stride) && is_aligned(from.data, 16);
  const std::int64_t groups = ceil_div(from.c, std::int64_t{kTurnSide});
  const std::int64_t runs = ceil_div(from.h * from.w, std::int64_t{kTurnSide});
  const TurnParams params{
      {from.data, from.n_stride, from.c_stride, from.h_stride, from.w_stride, static_cast<int>(from.n),
       static_cast<int>(from.c), static_cast<int>(from.h), static_cast<int>(from.w)},
      space_.data(),
      lines ? 1 : 0,
      Divisor(groups),
      Divisor(runs),
      Divisor(from.w)};
  get_kernel(turn_instance(), context.device.index).launch(from.n * runs * groups, 256, 0, &params, context.stream);
  image_ = {space_.data(), from.n, from.c, from.h, from.w, from.h * from.w * from.c, 1, from.w * from.c, from.c};
}

Blocks::Blocks(const Problem& p, Context& context)
    : view_(view_of(p, p.values)),
      space_(context, view_ ? 0
                            : static_cast<std::size_t>(p.layout->nnz() * p.block_rows() * p.block_cols()) *
                                  sizeof(std::uint16_t)) {
  if (view_) {
    return;
  }
  const auto block = static_cast<int>(p.layout->sizes().block_rows);
  const PackParams params{
      {p.values.data, p.values.block_stride, p.values.row_stride, p.values.col_stride, block, block},
      space_.data(),
      static_cast<int>(p.layout->nnz())};
  get_kernel(pack_instance(), context.device.index)
      .launch(std::min<std::int64_t>(p.layout->nnz() * block * block / 256, 1 << 14), 256, 0, &params, context.stream);
  view_ = view_of(p, {space_.data(), static_cast<std::int64_t>(block) * block, block, 1});
}

AxisClass::AxisClass(const Axis& axis, std::int64_t residue, std::int64_t size) : at(residue), mul(axis.mul) {
  count = size > residue ? ceil_div(size - residue, axis.div) : 0;
  std::vector<std::int64_t> moved;
  for (std::int64_t r = 0; r < axis.taps; ++r) {
    const std::int64_t to = axis.at(residue, r);
    if (to % axis.div == 0) {
      taps.push_back(static_cast<int>(r));
      moved.push_back(to / axis.div);
    }
  }
  first = moved.empty() ? 0 : *std::min_element(moved.begin(), moved.end());
  for (const std::int64_t to : moved) {
    offsets.push_back(static_cast<int>(std::min<std::int64_t>(to - first, kMostOffset + 1)));
  }
}
bool AxisClass::fits() const {
  return std::all_of(offsets.begin(), offsets.end(), [](int offset) { return offset <= kMostOffset; });
}

Image class_of(const Problem& p, const AxisClass& y, const AxisClass& x) {
  Image part = p.out;
  part.data = static_cast<std::uint16_t*>(p.out.data) + y.at * p.out.h_stride + x.at * p.out.w_stride;
  part.h = y.count;
  part.w = x.count;
  part.h_stride = p.out.h_stride * p.y.div;
  part.w_stride = p.out.w_stride * p.x.div;
  return part;
}

std::string class_key(const Problem& p, const AxisClass& y, const AxisClass& x) {
  std::string key = std::to_string(p.x.taps) + (p.transposed ? " t" : " n");
  for (const AxisClass* axis : {&y, &x}) {
    for (std::size_t n = 0; n < axis->taps.size(); ++n) {
      key += " " + std::to_string(axis->taps[n]) + "+" + std::to_string(axis->offsets[n]);
    }
    key += ",";
  }
  return key;
}

driver::PixelMap pixel_map(const Image& in, std::array<std::int64_t, 2> first, std::array<std::int64_t, 2> mul,
                           std::array<std::int64_t, 2> count) {
  const auto bytes = [&](std::int64_t size, std::int64_t stride) {
    return static_cast<std::uint64_t>((size == 1 ? in.c : stride) * 2);  // any valid stride will do for a size of 1
  };
  const auto whole_size = [](std::int64_t size) { return static_cast<std::uint64_t>(size); };
  return {in.data,
          {whole_size(in.c), whole_size(in.w), whole_size(in.h), whole_size(in.n)},
          {bytes(in.w, in.w_stride), bytes(in.h, in.h_stride), bytes(in.n, in.n_stride)},
          first,
          mul,
          count};
}

Map pixels_of(const driver::PixelMap& map, int channels, int pixels) {
  const auto swizzle = channels == 64   ? driver::Swizzle::b128
                       : channels == 32 ? driver::Swizzle::b64
                                        : driver::Swizzle::b32;
  return std::bit_cast<Map>(
      driver::make_pixel_map(map, static_cast<std::uint32_t>(channels), static_cast<std::uint32_t>(pixels), swizzle));
}

ImageOut image_out(const Image& out, bool rows) {
  const bool lines = out.w_stride == 1 && (out.h == 1 || out.h_stride == out.w) && whole(out.h * out.w);
  const bool vector = is_aligned(out.data, 16) && whole(out.n_stride) &&
                      (rows ? whole(out.h_stride) && whole(out.w_stride) : lines && whole(out.c_stride));
  return {out.data, out.n_stride, out.c_stride, out.h_stride, out.w_stride, vector ? 1 : 0, 0};
}

}  // namespace fretwork::block_conv::hopper
