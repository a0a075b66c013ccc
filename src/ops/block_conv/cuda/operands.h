// Operands of the Hopper kernels: images in channels-last order, packed blocks, TMA maps, and residue classes of output
// positions.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "blocks/hopper.h"
#include "ops/block_conv/problem.h"

namespace fretwork::block_conv::hopper {

KernelSpec turn_instance();
KernelSpec pack_instance();

/// Whether channels are contiguous and all other strides are multiples of 16 bytes.
bool channels_last(const Image& image);
/// Whether the pixels of a channel are contiguous and all other strides are multiples of 16 bytes.
bool pixels_last(const Image& image);
/// Such images as a TMA view (pixel, channel, image, 1), if TMA can read them.
std::optional<TiledView> lines_of(const Image& image);
/// Whether all pixels of all images have one stride.
bool one_line(const Image& image);

/// Images in channels-last order, copied if necessary. `dense`: all pixels must have one stride, too (one_line).
class ChannelsLast {
 public:
  ChannelsLast(const Image& from, bool dense, Context& context);
  const Image& image() const { return image_; }

 private:
  Image image_;
  Workspace space_;
};

/// A TMA view of the packed blocks, which are copied if TMA cannot read them.
class Blocks {
 public:
  Blocks(const Problem& p, Context& context);
  const blocks::View& view() const { return *view_; }

 private:
  std::optional<blocks::View> view_;
  Workspace space_;
};

/// One axis of a residue class, the output positions `at`, `at` + div, …: the kernel positions (`taps`) that read
/// integer input positions there, and their offsets from the smallest of these, `first`.
struct AxisClass {
  std::int64_t at = 0, count = 0, first = 0, mul = 1;
  std::vector<int> taps, offsets;

  AxisClass(const Axis& axis, std::int64_t residue, std::int64_t size);
  bool fits() const;
};

/// The result at the output positions of one class.
Image class_of(const Problem& p, const AxisClass& y, const AxisClass& x);

/// The part of a plan's cache key beside the layout and the device.
std::string class_key(const Problem& p, const AxisClass& y, const AxisClass& x);

/// The im2col view of channels-last images, arguments as (w, h): the first pixel, the stride and the number of pixels
/// visited. pixels_of makes a TMA map from it that loads 64, 32 or 16 channels × `pixels`.
fretwork::cuda::PixelMap pixel_map(const Image& in, std::array<std::int64_t, 2> first, std::array<std::int64_t, 2> mul,
                                   std::array<std::int64_t, 2> count);
Map pixels_of(const fretwork::cuda::PixelMap& map, int channels, int pixels);

/// How threads store images. `rows`: channels are contiguous.
blocks::ImageOut image_out(const Image& out, bool rows);

/// Runs a class on the patch kernel, which loads each pixel once for all kernel positions; false if it does not suit.
bool run_patches(const Problem& p, const Blocks& blocks, const Image& in, const AxisClass& y, const AxisClass& x,
                 Context& context);

}  // namespace fretwork::block_conv::hopper
