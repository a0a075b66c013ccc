// What the Hopper kernels of the convolution read and write: images in channels-last order, packed blocks, and the
// classes of output positions that meet the same kernel positions.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "blocks/hopper.h"
#include "ops/block_conv/problem.h"

namespace fretwork::block_conv::hopper {

KernelSpec turn_instance();
KernelSpec pack_instance();

/// Whether channels are neighbours and everything else lies in units of 16 bytes.
bool channels_last(const Image& image);
/// Whether the pixels of an image are neighbours and everything else lies in units of 16 bytes.
bool pixels_last(const Image& image);
/// Such images as (pixel, channel, image, 1), if the copy engine can move them.
std::optional<TiledView> lines_of(const Image& image);
/// Whether pixels follow one another at one distance.
bool one_line(const Image& image);

/// Images in channels-last order, copied if they are not. `dense`: pixels have to be one line too.
class ChannelsLast {
 public:
  ChannelsLast(const Image& from, bool dense, Context& context);
  const Image& image() const { return image_; }

 private:
  Image image_;
  Workspace space_;
};

/// The packed blocks as the copy engine reads them, copied if it cannot.
class Blocks {
 public:
  Blocks(const Problem& p, Context& context);
  const blocks::View& view() const { return *view_; }

 private:
  std::optional<blocks::View> view_;
  Workspace space_;
};

/// One axis for the output positions `at`, `at` + div, …: which kernel positions meet them, and how far each moves.
struct AxisClass {
  std::int64_t at = 0, count = 0, first = 0, mul = 1;
  std::vector<int> taps, offsets;

  AxisClass(const Axis& axis, std::int64_t residue, std::int64_t size);
  bool fits() const;
};

/// The positions of one class in the result.
Image class_of(const Problem& p, const AxisClass& y, const AxisClass& x);

/// What a plan depends on beside the layout and the device.
std::string class_key(const Problem& p, const AxisClass& y, const AxisClass& x);

/// Images whose channels are neighbours as the copy engine gathers them, (w, h) each: its first pixel, the distance and
/// the number of those it visits. Then 64, 32 or 16 channels × `pixels` of them.
fretwork::cuda::PixelMap pixel_map(const Image& in, std::array<std::int64_t, 2> first, std::array<std::int64_t, 2> mul,
                                   std::array<std::int64_t, 2> count);
Map pixels_of(const fretwork::cuda::PixelMap& map, int channels, int pixels);

/// How threads write images. `rows`: channels are neighbours.
blocks::ImageOut image_out(const Image& out, bool rows);

/// Runs a class on the patch kernel, which fetches pixels once for all kernel positions; false where it does not fit.
bool run_patches(const Problem& p, const Blocks& blocks, const Image& in, const AxisClass& y, const AxisClass& x,
                 Context& context);

}  // namespace fretwork::block_conv::hopper
