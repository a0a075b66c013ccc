// A 2:4 matrix as the program looks at it: from a file of fw.two_four.save, or random.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "fretwork/tensor.h"
#include "pattern/pattern_stats.h"

namespace fretwork::cli {

/// Stored line by line, whatever its dim. Values of a file stay there until they are asked for.
struct TwoFourMatrix {
  std::string name;  ///< in its file; empty for the only one
  DType dtype = DType::f16, word = DType::i16;
  int dim = 1;
  std::int64_t lines = 0, k = 0;
  std::vector<std::uint8_t> metadata;  ///< lines of whole words
  std::filesystem::path file;          ///< empty: no values
  std::int64_t values_at = 0;          ///< where they begin in it

  std::array<std::int64_t, 2> shape() const;
  std::int64_t groups() const;  ///< of a line
  std::int64_t words() const;   ///< of a line
  int nibble(std::int64_t line, std::int64_t group) const;
  /// Whether the nibble is one of those that this type has.
  bool valid(int nibble) const;
  /// The values of a line. Throws Error when the file cannot be read.
  std::vector<double> values(std::int64_t line) const;
  /// Bytes of values and metadata.
  double stored() const;
  /// "(row, column)" of a group's first element.
  std::string place(std::int64_t line, std::int64_t group) const;
};

/// Every matrix in the file, or the one called `name`. Throws Error, beginning with `command`, that says what is wrong
/// with the file; nibbles are not looked at.
std::vector<TwoFourMatrix> read_two_four(const std::filesystem::path& file, const std::string& name,
                                         const std::string& command);

/// "two_four(rows,cols,seed)": fp16, and each group keeps any two with equal chance. Throws UsageError.
TwoFourMatrix random_two_four(const std::string& text);

/// The kept places of the upper left corner of at most max_rows × max_cols. Throws Error on an invalid nibble there.
Occupancy corner(const TwoFourMatrix& matrix, std::int64_t max_rows, std::int64_t max_cols);

}  // namespace fretwork::cli
