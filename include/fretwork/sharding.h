// A pattern's rows cut over ranks: contiguous ranges of nearly equal work, and the keys that each rank needs of others.
// Exact, from the pattern's parts: nothing here grows with the square of a length.
#pragma once

#include <cstdint>
#include <vector>

#include "fretwork/pattern.h"
#include "fretwork/patterns.h"

namespace fretwork {

/// Keys [begin, end) of a rank.
struct KeyRange {
  std::int64_t rank, begin, end;
  bool operator==(const KeyRange&) const = default;
};

/// Who has which queries and keys of a pattern. A square pattern's keys are cut where its queries are, others' keys
/// into equal parts.
struct Shards {
  RegularPtr pattern;
  std::vector<patterns::Span> rows, keys;  ///< of each rank, in order

  /// Elements of a rank's rows; and the keys that they need of other ranks, ascending and as long as can be.
  std::int64_t nnz(std::int64_t rank) const;
  std::vector<KeyRange> needs(std::int64_t rank) const;
};

/// Cuts the rows where their elements come nearest to equal shares, at multiples of `align`. A rank may get no rows.
/// Block layouts of one head and Kronecker patterns count as regular. Throws Error on others, and on world_size or
/// align below 1.
Shards shard(const PatternPtr& pattern, std::int64_t world_size, std::int64_t align = 128);

/// Elements of some rows; and all keys that they have, cut where a rank's end: rank r has the keys from
/// key_ends[r − 1], or 0, to key_ends[r].
std::int64_t nnz_of_rows(const PatternPtr& pattern, patterns::Span rows);
std::vector<KeyRange> keys_of_rows(const PatternPtr& pattern, patterns::Span rows,
                                   std::span<const std::int64_t> key_ends);

}  // namespace fretwork
