// Walks for attention's Hopper kernels that the device writes: what the pattern says of row tiles and column tiles is
// uploaded once, and the runs of each row tile and the work of each CTA are written on the device.
#include "ops/dynamic_attention/cuda/hopper_walk.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <span>
#include <string>

#include "runtime/cuda_driver.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"
#include "runtime/upload_arena.h"

namespace fretwork::dynamic_attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;

enum Writer : std::size_t { kBlockWalk, kScanTiles, kDocumentWalk, kOrder, kWriters };
constexpr const char* kNames[kWriters] = {"write_block_walk", "scan_tiles", "write_document_walk", "order_items"};
constinit KernelTable<kWriters> table;

KernelSpec spec(std::size_t which) {
  return {"ops/dynamic_attention/cuda/hopper_walk.cuh",
          std::string("fretwork::dynamic_attention_op::hopper::") + kNames[which]};
}
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (std::size_t n = 0; arch == "sm_90a" && n < kWriters; ++n) {
    list.push_back(spec(n));
  }
  return list;
}
const KernelList kList{"dynamic_attention", list_kernels};

void launch(Writer which, std::int64_t grid, int threads, const void* params, Context& context) {
  table.get(which, context.device.index, [&] { return spec(which); }).launch(grid, threads, 0, params, context.stream);
}

}  // namespace

/// Arrays in one allocation. A list of them is gone through twice: for its size, then for the places.
class Arrays {
 public:
  template <typename T>
  void add(T*& array, std::int64_t count) {
    array = reinterpret_cast<T*>(end_);
    end_ += (static_cast<std::size_t>(count) * sizeof(T) + 15) / 16 * 16;
  }
  template <typename List>
  static std::unique_ptr<Workspace> allocate(const List& list, Context& context) {
    Arrays sizes(0);
    list(sizes);
    auto memory = std::make_unique<Workspace>(context, sizes.end_);
    Arrays places(reinterpret_cast<std::uintptr_t>(memory->data()));
    list(places);
    return memory;
  }

 private:
  explicit Arrays(std::uintptr_t at) : end_(at) {}
  std::uintptr_t end_;
};

namespace {

// ---------------------------------------------------------------------------------------- what the pattern says

}  // namespace

struct Bands {
  driver::DeviceBuffer memory;
  std::size_t bands = 0, parts = 0, col_tiles = 0, col_tokens = 0, col_used = 0, bits = 0, used = 0;
  bool general = false;  ///< masks of bits, or columns that no row of a tile uses
  std::size_t bytes() const { return memory.bytes(); }
};

namespace {

/// The rows of a tile as a column tile of `limit` columns meets them: columns [begin, end) of it.
std::vector<Interval> clip(std::span<const Interval> rows, int first, int limit) {
  std::vector<Interval> clipped;
  for (const Interval& row : rows) {
    const int begin = std::clamp(row.begin - first, 0, limit), end = std::clamp(row.end - first, 0, limit);
    clipped.push_back(begin < end ? Interval{begin, end} : Interval{0, 0});
  }
  return clipped;
}

/// A mask by bounds that grow by one from row to row, if that is what the rows are.
std::optional<Part> band_mask(const std::vector<Interval>& rows, int side, int limit) {
  int low = -attention_op::hopper::kRows - side, high = attention_op::hopper::kRows + side;
  for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
    const auto& [begin, end] = rows[static_cast<std::size_t>(i)];
    low = begin > 0 ? begin - i : low;
    high = end > 0 && end < limit ? end - 1 - i : high;
  }
  for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
    const auto& [begin, end] = rows[static_cast<std::size_t>(i)];
    const int from = std::max(0, low + i), to = std::min(limit, high + i + 1);
    if (begin < end ? from != begin || to != end : from < to) {
      return std::nullopt;
    }
  }
  return Part{0, attention_op::hopper::kBand, low, high, limit};
}

/// What column tiles of a pattern become.
struct Columns {
  Axis axis;
  int row_side;
  std::vector<Place> tiles;
  std::vector<int> tokens, used;
  std::vector<unsigned> bits, words;

  Columns(const Axis& cols, int rows_of_a_tile) : axis(cols), row_side(rows_of_a_tile) {
    for (int n = 0; n < axis.tiles(); ++n) {
      add(n, -1);
    }
  }
  int add(int n, int used_at) {
    tiles.push_back(axis.place(n));
    for (int i = 0; i < axis.side; ++i) {
      tokens.push_back(i < axis.count(n) ? n * axis.side + i : -1);
    }
    used.push_back(used_at);
    return static_cast<int>(tiles.size()) - 1;
  }
  /// One bit for each column that a row has.
  static void mark(const Interval& row, unsigned* to) {
    for (int i = row.begin; i < row.end; ++i) {
      to[i / 32] |= 1u << i % 32;
    }
  }

  /// Column tile n as the rows of one row tile meet it. Columns that none of them uses have a tile of their own, which
  /// says so: they may hold NaN.
  Part part(int n, std::span<const Interval> tile_rows) {
    const int limit = axis.count(n), line = axis.side / 32;
    const std::vector<Interval> rows = clip(tile_rows, n * axis.side, limit);
    std::vector<unsigned> some(static_cast<std::size_t>(line));
    for (const Interval& row : rows) {
      mark(row, some.data());
    }
    int columns = 0;
    for (const unsigned word : some) {
      columns += std::popcount(word);
    }
    Part made = band_mask(rows, axis.side, limit).value_or(Part{0, static_cast<int>(bits.size()), 0, 0, 0});
    if (made.kind >= 0) {
      bits.resize(bits.size() + static_cast<std::size_t>(row_side * line));
      for (std::size_t i = 0; i < rows.size(); ++i) {
        mark(rows[i], bits.data() + static_cast<std::size_t>(made.kind) + i * static_cast<std::size_t>(line));
      }
    }
    made.tile = n;
    if (columns < limit) {
      made.tile = add(n, static_cast<int>(words.size()));
      words.insert(words.end(), some.begin(), some.end());
    }
    return made;
  }
};

/// Which column tiles the rows of a tile meet: some of their elements, or all.
Band band_of(std::span<const Interval> rows, const Axis& cols) {
  std::int64_t begin = cols.tokens, end = 0, all_begin = 0, all_end = cols.tokens;
  for (const Interval& row : rows) {
    if (row.begin < row.end) {
      begin = std::min<std::int64_t>(begin, row.begin);
      end = std::max<std::int64_t>(end, row.end);
      all_begin = std::max<std::int64_t>(all_begin, row.begin);
      all_end = std::min<std::int64_t>(all_end, row.end);
    } else {
      all_end = 0;
    }
  }
  if (begin >= end) {
    return {0, 0, 0, 0, 0};
  }
  const int first = static_cast<int>(begin / cols.side), last = static_cast<int>(ceil_div(end, cols.side));
  const int whole = static_cast<int>(ceil_div(all_begin, cols.side)),
            whole_last = static_cast<int>(all_end / cols.side);
  return whole < whole_last ? Band{first, whole, whole_last, last, 0} : Band{first, first, first, last, 0};
}

std::shared_ptr<const Bands> find_bands(const RegularPattern& pattern, const Axis& rows, const Axis& cols, bool keys,
                                        const Context& context) {
  const std::string key =
      "hopper " + std::to_string(rows.side) + "x" + std::to_string(cols.side) + (keys ? " k " : " q ") + pattern.key();
  return find_device_plan<Bands>(key, context, [&](int device) {
    const auto known = intervals_of("attention", pattern);
    const std::vector<Interval>& lines = keys ? known->cols : known->rows;
    Columns columns(cols, rows.side);
    std::vector<Band> bands;
    std::vector<Part> parts;
    for (int t = 0; t < rows.tiles(); ++t) {
      const auto tile =
          std::span(lines).subspan(static_cast<std::size_t>(t * rows.side), static_cast<std::size_t>(rows.count(t)));
      Band& band = bands.emplace_back(band_of(tile, cols));
      band.part = static_cast<int>(parts.size());
      for (int n = band.first; n < band.last; ++n) {
        if (n < band.whole || n >= band.whole_last) {
          parts.push_back(columns.part(n, tile));
        }
      }
    }
    driver::UploadArena arena;
    Bands made;
    made.bands = arena.add(bands);
    made.parts = arena.add(parts);
    made.col_tiles = arena.add(columns.tiles);
    made.col_tokens = arena.add(columns.tokens);
    made.col_used = arena.add(columns.used);
    made.bits = arena.add(columns.bits);
    made.used = arena.add(columns.words);
    made.general = !columns.bits.empty() || !columns.words.empty();
    made.memory = arena.upload(device);
    return made;
  });
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- walks

namespace {

/// Blocks that a row block may have.
std::int64_t most_listed(const Keys& keys) {
  return keys.form == Form::lists ? std::min(keys.entries, keys.cols) : keys.cols;
}

}  // namespace

std::int64_t most_runs(const Keys& keys, int row_side, int col_side) {
  return keys.batch * keys.heads * keys.rows * most_listed(keys) *
         std::max<std::int64_t>(1, keys.block_rows * keys.block_cols / (row_side * col_side));
}

bool needs_bits(const Keys& keys, bool transposed) {
  return keys.form != Form::documents && (transposed || keys.cols > 32 * kMostWords);
}

bool DeviceWalk::general() const { return bands_ != nullptr && bands_->general; }

DeviceWalk::DeviceWalk(const Problem& problem, const BlockBits* bits, const Axis& rows, const Axis& cols, bool keys,
                       Context& context)
    : rows_(rows), cols_(cols), of_keys_(keys) {
  const attention_op::Problem& p = problem.attention;
  const bool documents = problem.keys.form == Form::documents;
  heads_ = keys ? p.kv_heads : p.heads;
  tiles_ = documents ? static_cast<int>(rows.tokens / rows.side + problem.keys.documents + 2) : rows.tiles();
  most_items_ = p.batch * heads_ * tiles_;
  most_ctas_ = driver::device_info(context.device.index).multiprocessors * (attention_op::hopper::kRows / rows.side);
  made_.side = rows.side;
  made_.shift = rows.shift;
  if (documents) {
    write_documents(problem, context);
  } else {
    bands_ = find_bands(*p.patterns[0], rows, cols, keys, context);
    write_blocks(problem, bits, context);
  }
  walk_.row_tiles = made_.places;
  walk_.first = made_.first;
  walk_.last = made_.last;
  walk_.runs = made_.runs;
  walk_.row_tokens = made_.tokens;
  walk_.items = items_;
  walk_.share = share_;
  walk_.row_places = rows.side;
  walk_.col_places = cols.side;
}

int DeviceWalk::grid() const { return static_cast<int>(std::min(most_items_, most_ctas_)); }

namespace {

/// Of `numbers` row tiles.
void add_rows(Arrays& arrays, RowTiles& tiles, std::int64_t numbers, std::int64_t runs) {
  arrays.add(tiles.first, numbers);
  arrays.add(tiles.last, numbers);
  arrays.add(tiles.steps, numbers);
  arrays.add(tiles.runs, runs);
  arrays.add(tiles.places, numbers);
  arrays.add(tiles.tokens, numbers * tiles.side);
}

}  // namespace

void DeviceWalk::add_items(Arrays& arrays) {
  arrays.add(items_, most_items_);
  arrays.add(share_, grid() + 1);
}

void DeviceWalk::write_blocks(const Problem& problem, const BlockBits* bits, Context& context) {
  const Keys& keys = problem.keys;
  BlockWalkParams params{};
  static_cast<RowTiles&>(params) = made_;
  params.row_blocks = static_cast<int>(of_keys_ ? keys.cols : keys.rows);
  params.tiles = tiles_;
  params.numbers = static_cast<int>(keys.batch * keys.heads * tiles_);
  params.row_tiles_each = static_cast<int>(of_keys_ ? keys.block_cols : keys.block_rows) / rows_.side;
  params.col_tiles_each = static_cast<int>(of_keys_ ? keys.block_rows : keys.block_cols) / cols_.side;
  params.rows = static_cast<int>(rows_.tokens);
  params.bands = driver::uploaded<Band>(bands_->memory, bands_->bands);
  params.parts = driver::uploaded<Part>(bands_->memory, bands_->parts);
  if (bits == nullptr) {
    params.bits = bits_of(keys);
  } else {
    params.words = of_keys_ ? bits->transposed() : bits->words();
    params.words_row = of_keys_ ? bits->transposed_row() : bits->words_row();
  }
  if (of_keys_) {
    params.taken = bits->counter();
  } else {
    params.most = static_cast<int>(most_listed(keys)) * params.col_tiles_each;
  }
  memory_ = Arrays::allocate(
      [&](Arrays& arrays) {
        add_rows(arrays, params, params.numbers, most_runs(keys, rows_.side, cols_.side));
        add_items(arrays);
      },
      context);
  made_ = params;
  const OrderParams items = order(problem, nullptr);
  params.order = deals() ? OrderParams{} : items;
  launch(kBlockWalk, ceil_div(params.numbers, kThreads / 32), kThreads, &params, context);
  launch_order(items, context);
  walk_.col_tiles = driver::uploaded<Place>(bands_->memory, bands_->col_tiles);
  walk_.col_tokens = driver::uploaded<int>(bands_->memory, bands_->col_tokens);
  walk_.col_used = driver::uploaded<int>(bands_->memory, bands_->col_used);
  walk_.bits = driver::uploaded<unsigned>(bands_->memory, bands_->bits);
  walk_.used = driver::uploaded<unsigned>(bands_->memory, bands_->used);
}

void DeviceWalk::write_documents(const Problem& problem, Context& context) {
  const std::int64_t documents = problem.keys.documents;
  DocumentWalkParams params{};
  static_cast<RowTiles&>(params) = made_;
  params.documents = documents_of(problem, of_keys_);
  for (int* bound : {&params.documents.left, &params.documents.right}) {
    *bound = std::min(*bound, static_cast<int>(kMostTokens));
  }
  params.capacity = tiles_;
  params.cols.side = cols_.side;
  params.cols.shift = cols_.shift;
  params.cols.capacity = static_cast<int>(cols_.tokens / cols_.side + documents + 2);
  memory_ = Arrays::allocate(
      [&](Arrays& arrays) {
        const std::int64_t col_tiles = params.cols.capacity + 2 * std::int64_t{tiles_};
        add_rows(arrays, params, tiles_, std::int64_t{tiles_} * kDocumentRuns);
        arrays.add(params.first_tile, documents + 3);
        arrays.add(params.cols.first, documents + 3);
        arrays.add(params.cols.places, col_tiles);
        arrays.add(params.cols.tokens, col_tiles * cols_.side);
        arrays.add(params.cols.used, col_tiles);
        add_items(arrays);
      },
      context);
  made_ = params;
  const OrderParams items = order(problem, params.first_tile + documents + 2);
  params.order = deals() ? OrderParams{} : items;
  if (documents > kFewDocuments) {
    launch(kScanTiles, 2, kScanThreads, &params, context);
  }
  launch(kDocumentWalk, ceil_div(params.capacity + params.cols.capacity, kThreads / 32), kThreads, &params, context);
  launch_order(items, context);
  walk_.col_tiles = params.cols.places;
  walk_.col_tokens = params.cols.tokens;
  walk_.col_used = params.cols.used;
}

OrderParams DeviceWalk::order(const Problem& problem, const int* tile_count) const {
  const attention_op::Problem& p = problem.attention;
  const bool lists = problem.keys.form != Form::documents;
  const std::int64_t repeat = of_keys_ ? p.heads / p.kv_heads : 1;
  OrderParams params{};
  params.steps = made_.steps;
  params.tile_count = tile_count;
  params.tiles = tiles_;
  params.batch = static_cast<int>(p.batch);
  params.heads = static_cast<int>(heads_);
  params.list_batch = lists ? static_cast<int>(problem.keys.batch) : 1;
  params.list_heads = lists ? static_cast<int>(problem.keys.heads) : 1;
  params.repeat = static_cast<int>(repeat);
  params.together = static_cast<int>(std::max<std::int64_t>(1, attention_op::hopper::heads_in_l2(p) / repeat));
  params.coarse = std::max<int>(0, static_cast<int>(std::bit_width(static_cast<unsigned>(cols_.tiles()))) - kOrderBits);
  params.ctas = grid();
  params.items = items_;
  params.share = share_;
  return params;
}

void DeviceWalk::launch_order(const OrderParams& params, Context& context) const {
  if (deals()) {
    launch(kOrder, ceil_div(params.batch * heads_, params.together), kOrderThreads, &params, context);
  }
}

}  // namespace fretwork::dynamic_attention_op::hopper
