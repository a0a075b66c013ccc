// The input positions that a residue class reads, and packed image rows.
#include <algorithm>
#include <cstring>

#include "ops/block_conv/cpu/run.h"
#include "runtime/simd/runs.h"
#include "runtime/simd/strips.h"

namespace fretwork::block_conv::cpu {
namespace {

/// The least work worth a task.
constexpr double kLeastFlops = 2e6;

std::int64_t floor_div(std::int64_t n, std::int64_t by) { return n >= 0 ? n / by : -ceil_div(-n, by); }

}  // namespace

AxisClass::AxisClass(const Axis& axis, std::int64_t results, std::int64_t in_size, std::int64_t first_result)
    : first(first_result),
      count(std::max<std::int64_t>(0, ceil_div(results - first_result, axis.div))),
      mul(axis.mul),
      size(in_size) {
  for (std::int64_t r = 0; r < axis.taps; ++r) {
    const std::int64_t at_first = axis.at(first, r);
    if (at_first % axis.div != 0) {
      continue;
    }
    const std::int64_t shift = floor_div(at_first / axis.div, mul);
    const Tap tap{r, shift, at_first / axis.div - shift * mul};
    if (at(0, tap) < size && at(count - 1, tap) >= 0) {
      taps.push_back(tap);
    }
  }
}

ImageRows::ImageRows(const Problem& problem, const Tiles& tiles, const AxisClass& x)
    : p_(problem), tiles_(tiles), x_(x), unit_(static_cast<std::int64_t>(tiles.element) * tiles.group) {
  if (x.taps.empty()) {
    return;
  }
  const auto [least, most] =
      std::minmax_element(x.taps.begin(), x.taps.end(), [](const auto& a, const auto& b) { return a.shift < b.shift; });
  low_ = least->shift;
  width_ = x.count + most->shift - low_;
  for (const auto& tap : x.taps) {
    const auto found = std::find(phases_.begin(), phases_.end(), tap.phase);
    tap_phase_.push_back(static_cast<std::size_t>(found - phases_.begin()));
    if (found == phases_.end()) {
      phases_.push_back(tap.phase);
    }
  }
  block_bytes_ = simd::panel_bytes(tiles, p_.block_cols(), width_);
  phase_bytes_ = block_bytes_ * static_cast<std::size_t>(p_.others());
}

void ImageRows::clear(Packed& packed) const {
  for (const std::int64_t row : packed.rows) {
    packed.slot_of[static_cast<std::size_t>(row)] = -1;
  }
  packed.rows.clear();
  if (const auto rows = static_cast<std::size_t>(p_.in.n * p_.in.h); packed.slot_of.size() < rows) {
    packed.slot_of.resize(rows, -1);
  }
}

std::int64_t ImageRows::slot(Packed& packed, std::int64_t image, std::int64_t y) const {
  const std::int64_t row = image * p_.in.h + y;
  auto& slot = packed.slot_of[static_cast<std::size_t>(row)];
  if (slot < 0) {
    slot = static_cast<std::int32_t>(packed.rows.size());
    packed.rows.push_back(row);
  }
  return slot;
}

void ImageRows::allocate(Packed& packed) const {
  const std::size_t parts = packed.rows.size() * phases_.size();
  // Slack behind the last block: a row that packing clears, the end of a run's last vector, and rows that pad a strip.
  const auto behind = static_cast<std::size_t>(tiles_.rows * width_ * unit_ + simd::kRunSlack);
  packed.memory.need(simd::kRunSlack + parts * phase_bytes_ + behind);
  packed.done.assign(parts * static_cast<std::size_t>(p_.others()), 0);
}

const std::byte* ImageRows::at(Packed& packed, std::int64_t slot, std::size_t tap, std::int64_t other) const {
  const std::size_t part = static_cast<std::size_t>(slot) * phases_.size() + tap_phase_[tap];
  std::byte* const block =
      packed.memory.need(0) + simd::kRunSlack + part * phase_bytes_ + static_cast<std::size_t>(other) * block_bytes_;
  auto& done = packed.done[part * static_cast<std::size_t>(p_.others()) + static_cast<std::size_t>(other)];
  if (done == 0) {
    pack(packed, slot, tap_phase_[tap], other, block);
    done = 1;
  }
  return block + (x_.taps[tap].shift - low_) * unit_;
}

void ImageRows::pack(Packed& packed, std::int64_t slot, std::size_t phase, std::int64_t other, std::byte* to) const {
  // Positions [low, low + width) of this phase; [first, last) are inside the image.
  const std::int64_t first = std::max<std::int64_t>(low_, 0), at_first = first * x_.mul + phases_[phase];
  const std::int64_t last = std::min(low_ + width_, ceil_div(x_.size - phases_[phase], x_.mul));
  if (first >= last) {
    std::memset(to, 0, block_bytes_);
    return;
  }
  const Image& in = p_.in;
  const std::int64_t row = packed.rows[static_cast<std::size_t>(slot)];
  const std::int64_t element = row / in.h * in.n_stride + other * p_.block_cols() * in.c_stride +
                               row % in.h * in.h_stride + at_first * in.w_stride;
  auto* const from = static_cast<std::byte*>(in.data) + element * static_cast<std::int64_t>(size_of(p_.dtype));
  // Packing a channel also clears the positions up to the first image position of the next channel. So only the zeros
  // before the first channel are written here. What is cleared behind the last channel is zero in the next block
  // anyway.
  const std::int64_t before = (first - low_) * unit_;
  std::memset(to, 0, static_cast<std::size_t>(before));
  tiles_.pack({from, in.c_stride, in.w_stride * x_.mul}, p_.block_cols(), last - first, width_, to + before, 0);
}

std::int64_t stretches_for(double flops, std::int64_t per_thread, const Context& context) {
  const auto most = static_cast<double>(per_thread * std::max(context.executor->concurrency(), 1));
  return static_cast<std::int64_t>(std::clamp(flops / kLeastFlops, 1.0, most));
}

}  // namespace fretwork::block_conv::cpu
