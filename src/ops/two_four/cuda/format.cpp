// Host side of the kernels that make and undo the plain form: parameters and launches.
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "ops/two_four/cuda/params_format.cuh"
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
  const std::string kernel = std::string("fretwork::two_four_") + kNames[static_cast<int>(op)];
  if (op == Op::check_metadata) {
    return {"ops/two_four/cuda/format_check.cuh", kernel};
  }
  return {op == Op::squares ? "ops/two_four/cuda/format_square.cuh" : "ops/two_four/cuda/format.cuh",
          kernel + "<" + std::to_string(size) + ">", op == Op::squares ? format_tile_bytes() : KernelSpec::kBySize};
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

std::int64_t ceil_div(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

/// Whether accesses of `unit` bytes along an axis of `count` elements stay aligned and inside.
bool whole(const Matrix& m, std::int64_t pitch, std::int64_t count, std::int64_t size, std::int64_t unit) {
  return is_aligned(m.data, unit) && pitch * size % unit == 0 && count * size % unit == 0;
}

FormatMatrix dense_matrix(const Matrix& m, const Format& f) {
  const auto size = static_cast<std::int64_t>(size_of(f.dtype));
  const bool turned = m.along != 1 && std::abs(m.line) < std::abs(m.along);
  const bool wide =
      turned ? m.line == 1 && whole(m, m.along, f.lines, size, 16) : m.along == 1 && whole(m, m.line, f.k, size, 16);
  return {m.data, m.line, m.along, wide, turned};
}

/// `unit`: bytes of values that are written at once.
FormatPacked packed(const Format& f, std::int64_t unit) {
  const auto size = static_cast<std::int64_t>(size_of(f.dtype));
  const Matrix& v = f.values;
  const Matrix& w = f.words;
  FormatPacked q{};
  q.values = {v.data, v.line, v.along, v.along == 1 && whole(v, v.line, f.k / 2, size, unit), false};
  q.words = static_cast<unsigned char*>(w.data);
  q.words_line = w.line;
  q.words_along = w.along;
  q.bytes = ceil_div(f.groups(), std::int64_t{2} * f.word_bytes) * f.word_bytes;
  q.word_shift = std::countr_zero(static_cast<unsigned>(f.word_bytes));
  q.words_wide = w.along == 1 && whole(w, w.line, 8, f.word_bytes, 8);
  return q;
}

/// Of a word of elements: what is not the sign, except that an integer is zero only where all bits are.
unsigned magnitude_bits(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x7fffffffu;
    case DType::f16:
    case DType::bf16:
      return 0x7fff7fffu;
    case DType::i8:
    case DType::u8:
      return 0xffffffffu;
    default:
      return 0x7f7f7f7fu;
  }
}

/// The first NaN's magnitude.
unsigned largest_bits(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x7f800001u;
    case DType::f16:
      return 0x7c01u;
    case DType::bf16:
      return 0x7f81u;
    case DType::f8_e5m2:
      return 0x7du;
    case DType::u8:
      return 0xffu;
    default:
      return 0x7fu;
  }
}

FormatKind kind(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return FormatKind::f32;
    case DType::f16:
      return FormatKind::f16;
    case DType::bf16:
      return FormatKind::bf16;
    case DType::f8_e4m3:
      return FormatKind::f8_e4m3;
    case DType::f8_e5m2:
      return FormatKind::f8_e5m2;
    case DType::u8:
      return FormatKind::u8;
    default:
      return FormatKind::i8;
  }
}

FormatParams params(const Format& f) {
  FormatParams q{};
  q.lines = f.lines;
  q.k = f.k;
  q.tiles_k = static_cast<unsigned>(ceil_div(f.k, kFormatTileK));
  q.transposed = f.transposed;
  q.magnitude = magnitude_bits(f.dtype);
  q.largest = largest_bits(f.dtype);
  q.kind = kind(f.dtype);
  return q;
}

/// Says that nothing is bad, before anything looks.
void begin(std::int64_t* bad, Context& context) {
  if (bad != nullptr) {
    driver::fill_ones(bad, sizeof(*bad), context.stream);
  }
}

/// Whether all tiles are whole and all accesses wide, of the packed form too if there is one.
bool plain(const Format& f, const FormatParams& q) {
  const std::int64_t lines = kFormatLineBytes / static_cast<std::int64_t>(size_of(f.dtype));
  const bool packs = q.packed.words != nullptr;
  return q.dense.wide != 0 && q.dense.turned == 0 && f.lines % lines == 0 && f.k % kFormatTileK == 0 &&
         (!packs || (q.packed.values.wide != 0 && q.packed.words_wide != 0));
}

void launch(Op op, const Format& f, const FormatParams& q, Context& context) {
  const std::size_t size = size_of(f.dtype);
  const std::int64_t tiles = ceil_div(f.lines, kFormatLineBytes / static_cast<std::int64_t>(size)) * q.tiles_k;
  if (tiles > 0) {
    static KernelTable<15> table;
    const std::size_t which = 3 * static_cast<std::size_t>(op) + size / 2;
    const Kernel& kernel = table.get(which, context.device.index, [&] { return spec(op, size); });
    const bool shared = op == Op::squares || q.dense.turned != 0 || q.out.turned != 0;
    kernel.launch(tiles, kFormatThreads, shared ? format_tile_bytes() : 0, &q, context.stream);
  }
}

}  // namespace

void compress(const Format& f, std::int64_t* bad, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  FormatParams q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.packed = packed(f, 8);
  q.plain = plain(f, q) ? 1 : 0;
  q.bad = reinterpret_cast<unsigned long long*>(bad);
  begin(bad, context);
  launch(Op::compress, f, q, context);
}

void check(const Format& f, std::int64_t* bad, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  FormatParams q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.plain = plain(f, q) ? 1 : 0;
  q.bad = reinterpret_cast<unsigned long long*>(bad);
  begin(bad, context);
  launch(Op::compress, f, q, context);
}

void check_metadata(const Format& f, const Matrix& to, bool keep_valid, std::int64_t* bad, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  FormatParams q = params(f);
  q.packed = packed(f, 8);
  if (to.data != nullptr) {
    Format written = f;
    written.words = to;
    q.cols = packed(written, 8);
  }
  q.bad = reinterpret_cast<unsigned long long*>(bad);
  q.tiles_k = static_cast<unsigned>(ceil_div(q.packed.bytes, kFormatCheckBytes));
  q.valid = valid_nibbles(f.group());
  q.group = static_cast<int>(f.group());
  q.element_bytes = static_cast<int>(size_of(f.dtype));
  q.keep_valid = keep_valid ? 1 : 0;
  begin(bad, context);
  if (const std::int64_t tiles = ceil_div(f.lines, kFormatCheckLines) * q.tiles_k; tiles > 0) {
    static KernelTable<1> table;
    table.get(0, context.device.index, [] { return spec(Op::check_metadata, 0); })
        .launch(tiles, kFormatThreads, 0, &q, context.stream);
  }
}

void to_dense(const Format& f, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  FormatParams q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.packed = packed(f, 8);
  launch(Op::to_dense, f, q, context);
}

void gather(const Format& f, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  FormatParams q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.packed = packed(f, 8);
  launch(Op::gather, f, q, context);
}

void prune(const Format& f, const Matrix& out, bool transposable, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  FormatParams q = params(f);
  q.dense = dense_matrix(f.dense, f);
  q.out = dense_matrix(out, f);
  launch(transposable ? Op::squares : Op::prune, f, q, context);
}

void prune_both(const Format& rows, const Format& cols, Context& context) {
  const driver::DeviceScope scope(context.device.index);
  FormatParams q = params(rows);
  q.dense = dense_matrix(rows.dense, rows);
  q.packed = packed(rows, 16);
  q.cols = packed(cols, 16);
  launch(Op::squares, rows, q, context);
}

}  // namespace fretwork::two_four::cuda
