// Writes walks on the device.
#include "ops/dynamic_attention/cuda/walks.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/divide.h"
#include "fretwork/error.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"
#include "runtime/upload_arena.h"

namespace fretwork::dynamic_attention_op {
namespace {

namespace driver = fretwork::cuda;

constexpr const char* kSource = "ops/dynamic_attention/cuda/prepare.cuh";
constexpr int kRowsBeyond = 128;  // of intervals, so that a tile reads whole ones
constexpr const char* kKernels[] = {"write_bits",   "transpose_bits", "count_tokens",    "scan_tokens",
                                    "write_tokens", "scan_documents", "write_documents", "clear_outside"};

KernelSpec spec(const char* name) { return {kSource, std::string("fretwork::") + name}; }

KernelSpec join_spec(DType dtype) {
  return {kSource, std::string("fretwork::join_pieces<") + device_type(dtype) + ">"};
}

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const char* const name : kKernels) {
    list.push_back(spec(name));
  }
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    list.push_back(join_spec(dtype));
  }
  return list;
}
const KernelList kList{"dynamic_attention", list_kernels};

template <typename Params>
void launch(const char* name, std::int64_t grid, int threads, const Params& params, Context& context) {
  if (grid > 0) {
    get_kernel(spec(name), context.device.index).launch(grid, threads, 0, &params, context.stream);
  }
}
/// A warp for each.
template <typename Params>
void launch_warps(const char* name, std::int64_t warps, const Params& params, Context& context) {
  launch(name, ceil_div(warps * 32, kThreads), kThreads, params, context);
}

TableArg table_arg(const Table& t) { return {t.data, t.batch, t.head, t.row, t.col}; }

std::size_t bytes_of(std::int64_t words) { return static_cast<std::size_t>(words) * sizeof(int); }

unsigned inside(std::int64_t count) { return 512u | 512u << 10 | static_cast<unsigned>(count + 511) << 20; }

/// What some and what all rows of a tile have.
Reach reach_of(std::span<const Interval> rows) {
  constexpr int kMost = std::numeric_limits<int>::max();
  Reach made{kMost, 0, 0, kMost};
  for (const Interval& row : rows) {
    if (row.begin >= row.end) {
      made.whole_first = kMost;
      continue;
    }
    made.first = std::min(made.first, row.begin);
    made.last = std::max(made.last, row.end);
    made.whole_first = std::max(made.whole_first, row.begin);
    made.whole_last = std::min(made.whole_last, row.end);
  }
  return made.last == 0 ? Reach{0, 0, 0, 0} : made;
}

}  // namespace

std::shared_ptr<const DeviceTiles> device_tiles(const RegularPattern& pattern, int side, bool transposed,
                                                const Context& context) {
  const std::string key = std::to_string(side) + (transposed ? " t " : " x ") + pattern.key();
  return find_device_plan<DeviceTiles>(key, context, [&](int device) {
    const auto known = intervals_of("attention", pattern);
    const std::vector<Interval>& rows = transposed ? known->cols : known->rows;
    std::vector<attention_op::TileArg> tiles;
    std::vector<Reach> reach;
    std::vector<IntervalArg> intervals;
    for (const Interval& row : rows) {
      intervals.push_back({row.begin, row.end});
    }
    intervals.resize(intervals.size() + kRowsBeyond, {0, 0});
    for (std::int64_t base = 0; base < std::ssize(rows); base += side) {
      const std::int64_t count = std::min<std::int64_t>(side, std::ssize(rows) - base);
      tiles.push_back({static_cast<int>(base), inside(count), -1, 0});
      reach.push_back(
          reach_of(std::span(rows).subspan(static_cast<std::size_t>(base), static_cast<std::size_t>(count))));
    }
    driver::UploadArena arena;
    const std::size_t tiles_at = arena.add(tiles), reach_at = arena.add(reach), intervals_at = arena.add(intervals);
    DeviceTiles made{arena.upload(device), nullptr, nullptr, nullptr, static_cast<int>(tiles.size())};
    made.tiles = driver::uploaded<attention_op::TileArg>(made.memory, tiles_at);
    made.reach = driver::uploaded<Reach>(made.memory, reach_at);
    made.intervals = driver::uploaded<IntervalArg>(made.memory, intervals_at);
    return made;
  });
}

BitsParams bits_of(const Keys& keys) {
  BitsParams bits{};
  bits.mask = table_arg(keys.mask);
  bits.counts = table_arg(keys.counts);
  bits.indices = table_arg(keys.indices);
  bits.heads = static_cast<int>(keys.heads);
  bits.rows = static_cast<int>(keys.rows);
  bits.cols = static_cast<int>(keys.cols);
  bits.entries = static_cast<int>(keys.entries);
  bits.words_row = static_cast<int>(ceil_div(keys.cols, 32));
  bits.lines = keys.batch * keys.heads * keys.rows;
  return bits;
}

BlockBits::BlockBits(const Keys& keys, bool transposed, Context& context)
    : words_row_(static_cast<int>(ceil_div(keys.cols, 32))),
      transposed_row_(static_cast<int>(ceil_div(keys.rows, 32))),
      words_(context, bytes_of(kCounters + keys.batch * keys.heads * keys.rows * words_row_)),
      transposed_(context, transposed ? bytes_of(keys.batch * keys.heads * keys.cols * transposed_row_) : 0) {
  BitsParams bits = bits_of(keys);
  bits.words = static_cast<unsigned*>(words_.data()) + kCounters;
  bits.zero = counter();
  launch_warps("write_bits", bits.lines, bits, context);
  if (transposed) {
    TransposeParams turn{};
    turn.from = words();
    turn.to = static_cast<unsigned*>(transposed_.data());
    turn.rows = static_cast<int>(keys.rows);
    turn.cols = static_cast<int>(keys.cols);
    turn.from_row = words_row_;
    turn.to_row = transposed_row_;
    turn.row_tiles = transposed_row_;
    turn.col_tiles = words_row_;
    turn.tiles = keys.batch * keys.heads * turn.row_tiles * turn.col_tiles;
    launch_warps("transpose_bits", turn.tiles, turn, context);
  }
}

namespace {

/// Tokens of a piece: so that all multiprocessors have several, and a piece some steps of 64 columns for each member.
int piece_tokens(const Problem& problem, Context& context) {
  constexpr std::int64_t kPieces = 16, kSteps = 32, kCols = 64;  // of a multiprocessor; of a piece
  const Keys& keys = problem.keys;
  const std::int64_t all = keys.batch * keys.heads * keys.rows * std::max<std::int64_t>(keys.entries, 1);
  const std::int64_t group = problem.attention.heads / problem.attention.kv_heads;
  const int processors = driver::device_info(context.device.index).multiprocessors;
  const std::int64_t tokens = std::max(ceil_div(all, kPieces * processors), ceil_div(kSteps * kCols, group));
  return static_cast<int>(std::min(ceil_div(tokens, kCols) * kCols, std::int64_t{1} << 30));
}

}  // namespace

QueryLists::QueryLists(const Problem& problem, const BlockBits& bits, int side, Context& context)
    : list_heads_(static_cast<int>(problem.keys.heads)),
      side_(side),
      tiles_(static_cast<int>(ceil_div(problem.attention.cols, side))),
      piece_tokens_(piece_tokens(problem, context)),
      sum_line_{static_cast<int>(ceil_div(problem.attention.depth, 8) * 8),
                static_cast<int>(ceil_div(problem.attention.value_depth, 8) * 8)},
      lists_(problem.keys.batch * problem.keys.heads),
      room_(problem.keys.rows * std::max<std::int64_t>(problem.keys.entries, 1)),
      tiles_each_(static_cast<int>(ceil_div(problem.keys.block_cols, side))),
      capacity_(tiles_ + tiles_each_ * static_cast<int>(room_ / piece_tokens_)),
      first_(context, bytes_of(lists_ * (problem.keys.cols + 1))),
      tokens_(context, bytes_of(lists_ * room_)),
      first_piece_(context, bytes_of(lists_ * (tiles_ + 1))),
      pieces_(context, static_cast<std::size_t>(lists_ * capacity_) * sizeof(PieceArg)),
      sums_(context, bytes_of(lists_ * capacity_ * side_ * (sum_line_[0] + sum_line_[1]))) {
  if (lists_ * (room_ + capacity_) > std::numeric_limits<int>::max()) {
    throw Error("selected_attention", "indices", "fewer than 2^31 entries", std::to_string(lists_ * room_));
  }
  ListParams lists{};
  lists.words = bits.transposed();
  lists.first = static_cast<int*>(first_.data());
  lists.tokens = static_cast<int*>(tokens_.data());
  lists.lines = static_cast<int>(problem.keys.cols);
  lists.words_row = bits.transposed_row();
  lists.lists = lists_;
  lists.room = room_;
  lists.first_piece = static_cast<int*>(first_piece_.data());
  lists.pieces = static_cast<PieceArg*>(pieces_.data());
  lists.tiles = tiles_;
  lists.tiles_each = tiles_each_;
  lists.capacity = capacity_;
  lists.piece_tokens = piece_tokens_;
  launch_warps("count_tokens", lists.lists * lists.lines, lists, context);
  launch("scan_tokens", lists.lists, kScanThreads, lists, context);
  launch_warps("write_tokens", lists.lists * lists.lines, lists, context);
}

float* QueryLists::sums(int which) const {
  return static_cast<float*>(sums_.data()) + (which == 0 ? 0 : lists_ * capacity_ * side_ * sum_line_[0]);
}

void QueryLists::set(GatherArg& walk) const {
  walk.tokens = static_cast<const int*>(tokens_.data());
  walk.list_first = static_cast<const int*>(first_.data());
  walk.list_heads = list_heads_;
  walk.row_tile_count = capacity_;
  walk.pieces = static_cast<const PieceArg*>(pieces_.data());
  walk.piece_tokens = piece_tokens_;
  walk.side = side_;
  for (const int which : {0, 1}) {
    walk.sums[which] = sums(which);
    walk.sum_line[which] = sum_line_[which];
  }
}

void QueryLists::join(const attention_op::BackwardProblem& b, Context& context) const {
  JoinParams params{};
  params.first_piece = static_cast<const int*>(first_piece_.data());
  params.tiles = tiles_;
  params.ctas_each = static_cast<int>(ceil_div(side_ * std::max(sum_line_[0], sum_line_[1]) / 4, kThreads));
  params.capacity = capacity_;
  params.list_heads = list_heads_;
  params.side = side_;
  params.rows = static_cast<int>(b.forward.cols);
  for (const int which : {0, 1}) {
    params.sums[which] = sums(which);
    params.sum_line[which] = sum_line_[which];
    params.depth[which] = static_cast<int>(which == 0 ? b.forward.depth : b.forward.value_depth);
    params.out[which] = attention_op::output_arg(which == 0 ? b.d_k : b.d_v, b.forward.dtype);
  }
  get_kernel(join_spec(b.forward.dtype), context.device.index)
      .launch(lists_ * tiles_ * params.ctas_each * 2, kThreads, 0, &params, context.stream);
}

Documents documents_of(const Problem& problem, bool transposed) {
  const Keys& keys = problem.keys;
  const Table &rows = transposed ? keys.cu_k : keys.cu_q, &cols = transposed ? keys.cu_q : keys.cu_k;
  const auto bound = [](std::int64_t x) { return static_cast<int>(std::min<std::int64_t>(x, 1 << 30)); };
  Documents made{};
  made.cu_rows = static_cast<const int*>(rows.data);
  made.cu_cols = static_cast<const int*>(cols.data);
  made.cu_rows_stride = rows.batch;
  made.cu_cols_stride = cols.batch;
  made.documents = static_cast<int>(keys.documents);
  made.rows = static_cast<int>(transposed ? problem.attention.cols : problem.attention.rows);
  made.cols = static_cast<int>(transposed ? problem.attention.rows : problem.attention.cols);
  made.left = bound(transposed ? keys.right : keys.left);
  made.right = bound(transposed ? keys.left : keys.right);
  return made;
}

DocumentTiles::DocumentTiles(const Problem& problem, int side, bool transposed, Context& context)
    : count_(static_cast<int>((transposed ? problem.attention.cols : problem.attention.rows) / side +
                              problem.keys.documents + 2)),
      first_(context, bytes_of(problem.keys.documents + 3)),
      tiles_(context, static_cast<std::size_t>(count_) * sizeof(attention_op::TileArg)),
      reach_(context, static_cast<std::size_t>(count_) * sizeof(Reach)),
      intervals_(context, static_cast<std::size_t>((transposed ? problem.attention.cols : problem.attention.rows) +
                                                   kRowsBeyond) *
                              sizeof(IntervalArg)) {
  DocumentParams params{};
  static_cast<Documents&>(params) = documents_of(problem, transposed);
  params.side = side;
  params.capacity = count_;
  params.first = static_cast<int*>(first_.data());
  params.tiles = static_cast<attention_op::TileArg*>(tiles_.data());
  params.reach = static_cast<Reach*>(reach_.data());
  params.intervals = static_cast<IntervalArg*>(intervals_.data());
  launch("scan_documents", 1, kScanThreads, params, context);
  launch("write_documents", ceil_div(std::max<std::int64_t>(count_, params.rows + kRowsBeyond), kThreads), kThreads,
         params, context);
}

void clear_outside(const Problem& problem, Context& context) {
  const attention_op::Problem& p = problem.attention;
  OutsideParams params{};
  static_cast<Documents&>(params) = documents_of(problem, false);
  params.lse = attention_op::output_arg(p.lse, DType::f32);
  params.heads = static_cast<int>(p.heads);
  launch("clear_outside", ceil_div(p.heads * p.rows, kThreads), kThreads, params, context);
}

void DocumentTiles::set(WalkArg& walk) const {
  walk.row_tiles = static_cast<const attention_op::TileArg*>(tiles_.data());
  walk.row_tile_count = count_;
  walk.reach = static_cast<const Reach*>(reach_.data());
  walk.intervals = static_cast<const IntervalArg*>(intervals_.data());
}

}  // namespace fretwork::dynamic_attention_op
