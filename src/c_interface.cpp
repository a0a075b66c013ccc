// The C interface: patterns behind opaque handles, exceptions turned into texts at the border.
#include <algorithm>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "c_threads.h"
#include "fretwork/c.h"
#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "fretwork/pattern.h"
#include "fretwork/patterns.h"
#include "fretwork/sharding.h"
#include "fretwork/tensor.h"
#include "fretwork/two_four.h"
#include "pattern/regular.h"
#include "pattern/text.h"
#include "runtime/kernels.h"

struct fretwork_pattern {
  fretwork::PatternPtr is;
};

namespace {

thread_local std::string last_error;

/// What `body` returns, or `failed` with its text kept when it throws.
template <typename Body, typename Result>
Result guarded(Result failed, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "fretwork: call: expected no failure, got an unknown exception";
  }
  return failed;
}

/// Callers hold texts and come back with them, often at once.
fretwork_pattern* handle(fretwork::PatternPtr pattern) {
  return std::make_unique<fretwork_pattern>(fretwork_pattern{fretwork::text::remembered(std::move(pattern))}).release();
}

constexpr fretwork_pattern* kNone = nullptr;

fretwork::KroneckerPtr kronecker_of(const int64_t sizes[4]) {
  return fretwork::KroneckerPattern::make({sizes[0], sizes[1], sizes[2], sizes[3]});
}
std::vector<fretwork::KroneckerPtr> kroneckers_of(const int64_t* sizes, int count) {
  std::vector<fretwork::KroneckerPtr> patterns;
  for (int n = 0; n < count; ++n) {
    patterns.push_back(kronecker_of(sizes + 4 * n));
  }
  return patterns;
}

fretwork::KroneckerPtr as_kronecker(const fretwork_pattern* pattern) {
  auto is = std::dynamic_pointer_cast<const fretwork::KroneckerPattern>(pattern->is);
  if (is == nullptr) {
    throw fretwork::Error("KroneckerPattern", "text", "a Kronecker pattern", pattern->is->text());
  }
  return is;
}

fretwork::DType sparse_dtype(const char* op, const std::string& name) {
  using fretwork::DType;
  for (const DType dtype :
       {DType::f64, DType::f32, DType::f16, DType::bf16, DType::f8_e4m3, DType::f8_e5m2, DType::i8, DType::u8}) {
    if (name == fretwork::name_of(dtype)) {
      return dtype;
    }
  }
  throw fretwork::Error(op, "dtype", "a floating type, float8_e4m3fn, float8_e5m2, int8 or uint8", name);
}

fretwork::DType floating_named(const std::string& name) {
  using fretwork::DType;
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    if (name == fretwork::name_of(dtype)) {
      return dtype;
    }
  }
  throw fretwork::Error("plan", "dtype", "float64, float32, float16 or bfloat16", name);
}

int64_t* write_sizes(const fretwork::KroneckerPattern::Sizes& s, int64_t* out) {
  const int64_t all[] = {s.a, s.b, s.c, s.d};
  return std::copy(std::begin(all), std::end(all), out);
}

/// As much as there is room for; the length of all.
int64_t write_text(const std::string& all, char* text, size_t size) {
  if (size > 0) {
    text[all.copy(text, size - 1)] = '\0';
  }
  return static_cast<int64_t>(all.size());
}

int write_all(const std::vector<fretwork::KroneckerPtr>& patterns, int64_t* out) {
  for (const fretwork::KroneckerPtr& pattern : patterns) {
    out = write_sizes(pattern->sizes(), out);
  }
  return static_cast<int>(patterns.size());
}

}  // namespace

const char* fretwork_error() { return last_error.c_str(); }

fretwork_pattern* fretwork_pattern_parse(const char* text, size_t length) {
  return guarded(kNone, [&] { return handle(fretwork::parse_pattern({text, length})); });
}

fretwork_pattern* fretwork_block_layout(const int64_t sizes[5], const uint8_t* mask) {
  return guarded(kNone, [&] {
    // Negative sizes and products past 64 bits reach make() with a mask of the wrong length, and it says what is wrong.
    std::int64_t count = 1;
    const bool counted = !__builtin_mul_overflow(sizes[0], sizes[1], &count) &&
                         !__builtin_mul_overflow(count, sizes[2], &count) && count >= 0;
    return handle(fretwork::BlockLayout::make({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]},
                                              {mask, static_cast<std::size_t>(counted ? count : 0)}));
  });
}

fretwork_pattern* fretwork_kronecker_pattern(const int64_t sizes[4]) {
  return guarded(kNone, [&] {
    return handle(fretwork::KroneckerPattern::make({sizes[0], sizes[1], sizes[2], sizes[3]}));
  });
}

fretwork_pattern* fretwork_pattern_transpose(const fretwork_pattern* pattern) {
  return guarded(kNone, [&] { return handle(pattern->is->transpose()); });
}

void fretwork_pattern_free(fretwork_pattern* pattern) { const std::unique_ptr<fretwork_pattern> owned(pattern); }

int fretwork_pattern_hold(const fretwork_pattern* pattern) {
  return guarded(-1, [&] {
    fretwork::text::hold(*pattern->is);
    return 0;
  });
}

void fretwork_key_let_go(const char* key) {
  guarded(-1, [&] {
    fretwork::text::let_go(key);
    return 0;
  });
}

const char* fretwork_pattern_text(const fretwork_pattern* pattern) { return pattern->is->text().c_str(); }
const char* fretwork_pattern_key(const fretwork_pattern* pattern) { return pattern->is->key().c_str(); }
int fretwork_pattern_rank(const fretwork_pattern* pattern) { return static_cast<int>(pattern->is->shape().size()); }
const int64_t* fretwork_pattern_shape(const fretwork_pattern* pattern) { return pattern->is->shape().data(); }
int64_t fretwork_pattern_nnz(const fretwork_pattern* pattern) { return pattern->is->nnz(); }
double fretwork_pattern_density(const fretwork_pattern* pattern) { return pattern->is->density(); }

int fretwork_pattern_mask(const fretwork_pattern* pattern, uint8_t* out, int64_t count) {
  return guarded(-1, [&] {
    pattern->is->mask({out, static_cast<std::size_t>(count)});
    return 0;
  });
}

int fretwork_block_layout_sizes(const fretwork_pattern* pattern, int64_t sizes[5]) {
  return guarded(-1, [&] {
    const auto* layout = dynamic_cast<const fretwork::BlockLayout*>(pattern->is.get());
    if (layout == nullptr) {
      throw fretwork::Error("BlockLayout", "text", "a block layout", pattern->is->text());
    }
    const auto& s = layout->sizes();
    const std::int64_t all[] = {s.heads, s.rows, s.cols, s.block_rows, s.block_cols};
    std::copy(std::begin(all), std::end(all), sizes);
    return 0;
  });
}

fretwork_pattern* fretwork_pattern_from_mask(int64_t rows, int64_t cols, const uint8_t* mask) {
  return guarded(kNone, [&] {
    std::int64_t all = 0;
    const bool counted = rows >= 0 && cols >= 0 && !__builtin_mul_overflow(rows, cols, &all);
    return handle(fretwork::patterns::from_mask(rows, cols, {mask, static_cast<std::size_t>(counted ? all : 0)}));
  });
}

fretwork_pattern* fretwork_pattern_from_acsr(const int64_t* start, const int64_t* stride, const int64_t* count,
                                             int64_t rows, int64_t cols) {
  return guarded(kNone, [&] {
    const auto n = static_cast<std::size_t>(std::max<int64_t>(rows, 0));
    return handle(fretwork::patterns::acsr({start, n}, {stride, n}, {count, n}, cols));
  });
}

fretwork_pattern* fretwork_pattern_union(const fretwork_pattern* left, const fretwork_pattern* right) {
  return guarded(kNone, [&] { return handle(fretwork::patterns::unite(left->is, right->is)); });
}

fretwork_pattern* fretwork_pattern_intersection(const fretwork_pattern* left, const fretwork_pattern* right) {
  return guarded(kNone, [&] { return handle(fretwork::patterns::intersect(left->is, right->is)); });
}

fretwork_pattern* fretwork_pattern_slice(const fretwork_pattern* pattern, const int64_t ends[4]) {
  return guarded(kNone, [&] {
    return handle(fretwork::patterns::slice(pattern->is, {ends[0], ends[1]}, {ends[2], ends[3]}));
  });
}

fretwork_pattern* fretwork_pattern_place(const fretwork_pattern* pattern, int64_t rows, int64_t cols, int64_t row,
                                         int64_t col) {
  return guarded(kNone, [&] { return handle(fretwork::patterns::place(pattern->is, rows, cols, row, col)); });
}

fretwork_pattern* fretwork_pattern_diag(const fretwork_pattern* const* patterns, size_t count) {
  return guarded(kNone, [&] {
    std::vector<fretwork::PatternPtr> all;
    std::transform(patterns, patterns + count, std::back_inserter(all), [](const auto* one) { return one->is; });
    return handle(fretwork::patterns::diag(all));
  });
}

fretwork_pattern* fretwork_pattern_with_prefix(const fretwork_pattern* pattern, int64_t n) {
  return guarded(kNone, [&] { return handle(fretwork::patterns::with_prefix(pattern->is, n)); });
}

fretwork_pattern* fretwork_pattern_from_runs(int64_t rows, int64_t cols, const int64_t* runs, size_t count) {
  return guarded(kNone, [&] {
    std::vector<fretwork::patterns::Run> all(count);
    for (auto& run : all) {
      run = {runs[0], runs[1], runs[2]};
      runs += 3;
    }
    return handle(fretwork::patterns::from_runs(rows, cols, all));
  });
}

int fretwork_pattern_contains(const fretwork_pattern* pattern, int64_t row, int64_t col) {
  return guarded(-1, [&] { return fretwork::as_regular("contains", pattern->is)->contains(row, col) ? 1 : 0; });
}

int fretwork_pattern_shard(const fretwork_pattern* pattern, int64_t world_size, int64_t align, int64_t* row_ends,
                           int64_t* key_ends) {
  return guarded(-1, [&] {
    const fretwork::Shards shards = fretwork::shard(pattern->is, world_size, align);
    const auto end = [](const fretwork::patterns::Span& span) { return span.end; };
    std::transform(shards.rows.begin(), shards.rows.end(), row_ends, end);
    std::transform(shards.keys.begin(), shards.keys.end(), key_ends, end);
    return 0;
  });
}

int64_t fretwork_pattern_rows_nnz(const fretwork_pattern* pattern, int64_t begin, int64_t end) {
  return guarded(int64_t{-1}, [&] { return fretwork::nnz_of_rows(pattern->is, {begin, end}); });
}

int64_t fretwork_pattern_rows_keys(const fretwork_pattern* pattern, int64_t begin, int64_t end, const int64_t* key_ends,
                                   int64_t ranks, int64_t* keys, int64_t room) {
  return guarded(int64_t{-1}, [&] {
    const auto all = fretwork::keys_of_rows(pattern->is, {begin, end}, {key_ends, static_cast<std::size_t>(ranks)});
    for (std::size_t n = 0; n < all.size() && static_cast<int64_t>(n) < room; ++n) {
      *keys++ = all[n].rank;
      *keys++ = all[n].begin;
      *keys++ = all[n].end;
    }
    return static_cast<int64_t>(all.size());
  });
}

fretwork_pattern* fretwork_pattern_block_cover(const fretwork_pattern* pattern, int64_t block_rows, int64_t block_cols,
                                               double* fill_in) {
  return guarded(kNone, [&] {
    const auto cover = fretwork::patterns::block_cover(pattern->is, block_rows, block_cols);
    *fill_in = cover.fill_in;
    return handle(cover.layout);
  });
}

int fretwork_pattern_acsr(const fretwork_pattern* pattern, int64_t* start, int64_t* stride, int64_t* count) {
  return guarded(-1, [&] {
    for (const auto& row : fretwork::as_regular("acsr", pattern->is)->acsr()) {
      *start++ = row.start;
      *stride++ = row.stride;
      *count++ = row.count;
    }
    return 0;
  });
}

int64_t fretwork_pattern_describe(const fretwork_pattern* pattern, char* text, size_t size) {
  return guarded(int64_t{-1}, [&] {
    const auto regular = fretwork::as_regular("describe", pattern->is);
    return write_text(regular->describe() + fretwork::attention_cost(regular), text, size);
  });
}

int64_t fretwork_pattern_draw(const fretwork_pattern* pattern, int64_t head, int width, int colour, char* text,
                              size_t size) {
  return guarded(int64_t{-1}, [&] {
    return write_text(fretwork::draw(pattern->is, {head, width, colour != 0}), text, size);
  });
}

int64_t fretwork_pattern_svg(const fretwork_pattern* pattern, int64_t head, char* text, size_t size) {
  return guarded(int64_t{-1}, [&] { return write_text(fretwork::draw_svg(pattern->is, head), text, size); });
}

int fretwork_kronecker_sizes(const fretwork_pattern* pattern, int64_t sizes[4]) {
  return guarded(-1, [&] {
    write_sizes(as_kronecker(pattern)->sizes(), sizes);
    return 0;
  });
}

fretwork_pattern* fretwork_kronecker_block_layout(const fretwork_pattern* pattern) {
  return guarded(kNone, [&] { return handle(fretwork::kronecker::to_block_layout(as_kronecker(pattern))); });
}

int fretwork_kronecker_chainable(const int64_t left[4], const int64_t right[4]) {
  return guarded(-1, [&] { return fretwork::kronecker::chainable(kronecker_of(left), kronecker_of(right)) ? 1 : 0; });
}

int fretwork_kronecker_product(const int64_t left[4], const int64_t right[4], int64_t out[4]) {
  return guarded(-1, [&] {
    write_sizes(fretwork::kronecker::product(kronecker_of(left), kronecker_of(right))->sizes(), out);
    return 0;
  });
}

int fretwork_kronecker_monarch(int64_t out_features, int64_t in_features, int64_t p, int64_t q, int64_t* patterns) {
  return guarded(-1,
                 [&] { return write_all(fretwork::kronecker::monarch(out_features, in_features, p, q), patterns); });
}

int fretwork_kronecker_butterfly(int64_t n, int64_t* patterns) {
  return guarded(-1, [&] { return write_all(fretwork::kronecker::butterfly(n), patterns); });
}

int fretwork_kronecker_plan(const int64_t* patterns, int count, const char* arch, const char* dtype, int bs_last,
                            int64_t batch, char* text, size_t size) {
  return guarded(-1, [&] {
    std::string lines;
    for (const std::string& line :
         fretwork::kronecker::plan(kroneckers_of(patterns, count), arch, floating_named(dtype), bs_last != 0, batch)) {
      lines += (lines.empty() ? "" : "\n") + line;
    }
    return static_cast<int>(write_text(lines, text, size));
  });
}

int fretwork_kronecker_dense_wins(const int64_t* patterns, int count, const char* arch, const char* dtype, int bs_last,
                                  int64_t batch) {
  return guarded(-1, [&] {
    const auto chain = kroneckers_of(patterns, count);
    return fretwork::kronecker::dense_wins(chain, arch, floating_named(dtype), bs_last != 0, batch) ? 1 : 0;
  });
}

int fretwork_kronecker_project(const double* dense, int64_t rows, int64_t cols, const int64_t* patterns, int count,
                               double* const* weights, double* error, int threads) {
  return guarded(-1, [&] {
    const std::vector<fretwork::KroneckerPtr> factors = kroneckers_of(patterns, count);
    std::int64_t elements = 0;
    if (rows < 0 || cols < 0 || __builtin_mul_overflow(rows, cols, &elements)) {
      const std::int64_t given[] = {rows, cols};
      throw fretwork::Error("project", "dense", "fewer than 2^63 elements", fretwork::shape_text(given));
    }
    std::vector<std::vector<double>> made(factors.size());
    fretwork::ShortThreads executor(threads);
    const std::span all(dense, static_cast<std::size_t>(elements));
    *error = fretwork::kronecker::project(all, rows, cols, factors, made, executor);
    for (std::size_t n = 0; n < made.size(); ++n) {
      std::copy(made[n].begin(), made[n].end(), weights[n]);
    }
    return 0;
  });
}

int64_t fretwork_pattern_width(const fretwork_pattern* pattern, const char* op) {
  return guarded(int64_t{-1}, [&] { return fretwork::r_width(pattern->is, op); });
}

int fretwork_pattern_columns(const fretwork_pattern* pattern, int64_t width, int32_t* columns) {
  return guarded(-1, [&] {
    const auto entries = fretwork::as_regular("columns", pattern->is)->entries();
    for (std::size_t i = 0; i + 1 < entries.first.size(); ++i) {
      int32_t* const row = columns + static_cast<int64_t>(i) * width;
      int32_t* const end =
          std::copy(entries.columns.begin() + entries.first[i], entries.columns.begin() + entries.first[i + 1], row);
      std::fill(end, row + width, -1);
    }
    return 0;
  });
}

int fretwork_kernel_compile(const char* source, const char* name, const char* arch, int64_t report[4]) {
  return guarded(-1, [&] {
    const fretwork::KernelReport r = fretwork::compile_kernel({source, name}, arch).report;
    const int numbers[] = {r.registers, r.spill_bytes, r.stack_bytes, r.static_shared_bytes};
    std::copy(std::begin(numbers), std::end(numbers), report);
    return 0;
  });
}

const fretwork_kernel* fretwork_kernel_load(const char* source, const char* name, int device) {
  return guarded(static_cast<const fretwork_kernel*>(nullptr), [&] {
    return reinterpret_cast<const fretwork_kernel*>(&fretwork::get_kernel({source, name}, device));
  });
}

int fretwork_kernel_launch(const fretwork_kernel* kernel, int device, const unsigned grid[3], const unsigned block[3],
                           int shared_bytes, void** arguments, const size_t* sizes, int count, void* stream) {
  return guarded(-1, [&] {
    const fretwork::cuda::DeviceScope scope(device);
    const auto length = static_cast<std::size_t>(count);
    reinterpret_cast<const fretwork::Kernel*>(kernel)->launch_arguments({grid[0], grid[1], grid[2]},
                                                                        {block[0], block[1], block[2]}, shared_bytes,
                                                                        {arguments, length}, {sizes, length}, stream);
    return 0;
  });
}

int64_t fretwork_two_four_order(const char* op, const char* layout, int64_t lines, int64_t k, const char* dtype,
                                int64_t tile_k, int64_t* order, int64_t room) {
  return guarded(int64_t{-1}, [&] {
    const std::vector<std::int64_t> all =
        fretwork::two_four::order(op, layout, lines, k, sparse_dtype(op, dtype), tile_k);
    const auto count = static_cast<int64_t>(all.size());
    std::copy_n(all.begin(), std::min(count, room), order);
    return count;
  });
}

int fretwork_two_four_dense_wins(int64_t m, int64_t n, int64_t k, const char* dtype, const char* device, int index,
                                 const char* precision) {
  return guarded(-1, [&] {
    using fretwork::DeviceType, fretwork::Precision;
    const bool ieee = std::string_view(precision) == "ieee", cuda = std::string_view(device) == "cuda";
    return fretwork::two_four::dense_wins(m, n, k, sparse_dtype("linear", dtype),
                                          {cuda ? DeviceType::cuda : DeviceType::cpu, index},
                                          ieee ? Precision::ieee : Precision::tf32)
               ? 1
               : 0;
  });
}
