// Host side of the kernels that make and undo the 2:4 format: parameters and launches.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/cuda/params.h"
#include "ops/two_four/problem.h"
#include "runtime/alignment.h"
#include "runtime/kernels.h"

namespace fretwork::two_four::cuda {
namespace {

namespace driver = fretwork::cuda;

/// The kernels, each for elements of 1, 2 and 4 bytes; but the last looks at metadata alone.
enum class Op { compress, gather, to_dense, prune, squares, check_metadata };

KernelSpec spec(Op op, std::size_t size) {
  constexpr const char* kNames[] = {"compress", "gather", "to_dense", "prune", "squares", "check_metadata"};
  const int argument = op == Op::check_metadata ? format::kThreads : static_cast<int>(size);
  return {
      op == Op::squares ? "ops/two_four/cuda/format_square.cuh" : "ops/two_four/cuda/format.cuh",
      std::string("fretwork::two_four::format::") + kNames[static_cast<int>(op)] + "<" + std::to_string(argument) + ">",
      op == Op::check_metadata ? 0
      : op == Op::squares      ? format::tile_bytes()
                               : KernelSpec::kBySize};
}

std::vector<KernelSpec> list(const std::string& /*arch*/) {
  std::vector<KernelSpec> specs = {spec(Op::check_metadata, 0)};
  for (const Op op : {Op::compress, Op::gather, Op::to_dense, Op::prune, Op::squares}) {
    for (const std::size_t size : {1, 2, 4}) {
      specs.push_back(spec(op, size));
    }
  }
  return specs;
}

const KernelList kernels("two_four", list);

/// Whether accesses of `unit` bytes along an axis of `count` elements stay aligned and inside.
bool whole(const Matrix& m, std::int64_t pitch, std::int64_t count, std::int64_t size, std::int64_t unit) {
  return is_aligned(m.data, unit) && pitch * size % unit == 0 && count * size % unit == 0;
}

format::Matrix dense_matrix(const Matrix& m, const Format& f) {
  const auto size = static_cast<std::int64_t>(size_of(f.dtype));
  const bool turned = m.along != 1 && std::abs(m.line) < std::abs(m.along);
  const bool wide =
      turned ? m.line == 1 && whole(m, m.along, f.lines, size, 16) : m.along == 1 && whole(m, m.line, f.k, size, 16);
  return {m.data, m.line, m.along, wide, turned};
}

/// `unit`: bytes of values that are written at once.
format::Packed packed(const Format& f, std::int64_t unit) {
  const auto size = static_cast<std::int64_t>(size_of(f.dtype));
  const Matrix& v = f.values;
  const Matrix& w = f.words;
  format::Packed q{};
  q.values = {v.data, v.line, v.along, v.along == 1 && whole(v, v.line, f.k / 2, size, unit), false};
  q.words = static_cast<unsigned char*>(w.data);
  q.words_line = w.line;
  q.words_along = w.along;
  q.bytes = ceil_div(f.groups(), std::int64_t{2} * f.word_bytes) * f.word_bytes;
  q.word_shift = std::countr_zero(static_cast<unsigned>(f.word_bytes));
  q.words_wide = w.along == 1 && whole(w, w.line, 8, f.word_bytes, 8);
  return q;
}

/// How magnitudes are read off the bits of a type.
struct Bits {
  DType dtype;
  format::ElementType type;
  unsigned magnitude;  ///< of a word of elements: all but signs; an integer is zero only where all bits are
  unsigned largest;    ///< the first NaN's magnitude
};
const Bits& bits_of(DType dtype) {
  using format::ElementType;
  static constexpr Bits kBits[] = {{DType::f32, ElementType::f32, 0x7fffffffu, 0x7f800001u},
                                   {DType::f16, ElementType::f16, 0x7fff7fffu, 0x7c01u},
                                   {DType::bf16, ElementType::bf16, 0x7fff7fffu, 0x7f81u},
                                   {DType::f8_e4m3, ElementType::f8_e4m3, 0x7f7f7f7fu, 0x7fu},
                                   {DType::f8_e5m2, ElementType::f8_e5m2, 0x7f7f7f7fu, 0x7du},
                                   {DType::u8, ElementType::u8, 0xffffffffu, 0xffu},
                                   {DType::i8, ElementType::i8, 0xffffffffu, 0x7fu}};
  return *std::ranges::find(kBits, dtype, &Bits::dtype);
}

format::Params params(const Format& f) {
  format::Params q{};
  q.lines = f.lines;
  q.k = f.k;
  q.tiles_k = static_cast<unsigned>(ceil_div(f.k, format::kTileK));
  q.transposed = f.transposed;
  q.magnitude = bits_of(f.dtype).magnitude;
  q.largest = bits_of(f.dtype).largest;
  q.type = bits_of(f.dtype).type;
  return q;
}

/// Says that nothing is bad, before anything looks.
void begin(std::int64_t* bad, Context& context) {
  if (bad != nullptr) {
    driver::fill_ones(bad, sizeof(*bad), context.stream);
  }
}

/// Whether all tiles are whole and all accesses wide, of the packed form too if there is one.
bool plain(const Format& f, const format::Params& q) {
  const std::int64_t lines = format::kLineBytes / static_cast<std::int64_t>(size_of(f.dtype));
  const bool packs = q.packed.words != nullptr;
  return q.dense.wide != 0 && q.dense.turned == 0 && f.lines % lines == 0 && f.k % format::kTileK == 0 &&
         (!packs || (q.packed.values.wide != 0 && q.packed.words_wide != 0));
}

void launch(Op op, const Format& f, const format::Params& q, Context& context) {
  const std::size_t size = size_of(f.dtype);
  const std::int64_t tiles = ceil_div(f.lines, format::kLineBytes / static_cast<std::int64_t>(size)) * q.tiles_k;
  if (tiles > 0) {
    static KernelTable<15> table;
    const std::size_t which = 3 * static_cast<std::size_t>(op) + size / 2;
    const Kernel& kernel = table.get(which, context.device.index, [&] { return spec(op, size); });
    const bool shared = op == Op::squares || q.dense.turned != 0 || q.out.turned != 0;
    kernel.launch(tiles, format::kThreads, shared ? format::tile_bytes() : 0, &q, context.stream);
  }
}

}  // namespace

void compress(const Format& f, std::int64_t* bad, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  format::Params q = params(f);
  q.dense = dense_matrix(f.dense, f);
  if (f.words.data != nullptr) {
    q.packed = packed(f, 8);
  }
  q.plain = plain(f, q) ? 1 : 0;
  q.bad = reinterpret_cast<unsigned long long*>(bad);
  begin(bad, context);
  launch(Op::compress, f, q, context);
}

/// Without values and words, compress only looks.
void check(const Format& f, std::int64_t* bad, Context& context) {
  Format look = f;
  look.values = {};
  look.words = {};
  compress(look, bad, context);
}

void check_metadata(const Format& f, const Matrix& to, bool keep_valid, std::int64_t* bad, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  format::Params q = params(f);
  q.packed = packed(f, 8);
  if (to.data != nullptr) {
    Format written = f;
    written.words = to;
    q.cols = packed(written, 8);
  }
  q.bad = reinterpret_cast<unsigned long long*>(bad);
  q.tiles_k = static_cast<unsigned>(ceil_div(q.packed.bytes, format::kCheckBytes));
  q.valid = valid_nibbles(f.group());
  q.group = static_cast<int>(f.group());
  q.element_bytes = static_cast<int>(size_of(f.dtype));
  q.keep_valid = keep_valid ? 1 : 0;
  begin(bad, context);
  if (const std::int64_t tiles = ceil_div(f.lines, format::kCheckLines) * q.tiles_k; tiles > 0) {
    static KernelTable<1> table;
    table.get(0, context.device.index, [] { return spec(Op::check_metadata, 0); })
        .launch(tiles, format::kThreads, 0, &q, context.stream);
  }
}

void to_dense(const Format& f, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  format::Params q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.packed = packed(f, 8);
  launch(Op::to_dense, f, q, context);
}

void gather(const Format& f, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  format::Params q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.packed = packed(f, 8);
  launch(Op::gather, f, q, context);
}

void prune(const Format& f, const Matrix& out, bool transposable, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  format::Params q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.out = dense_matrix(out, f);
  launch(transposable ? Op::squares : Op::prune, f, q, context);
}

void prune_both(const Format& rows, const Format& cols, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  format::Params q = params(rows);
  q.dense = dense_matrix(rows.dense, rows);
  q.packed = packed(rows, 16);
  q.cols = packed(cols, 16);
  launch(Op::squares, rows, q, context);
}

}  // namespace fretwork::two_four::cuda
