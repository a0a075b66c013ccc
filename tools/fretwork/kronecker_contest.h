// The ways of one Kronecker product as candidates of the tuner: operands, a reference, calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kronecker_case.h"
#include "ops/kronecker/config.h"

namespace fretwork::cli {

/// Its operands' place in tables: "1,64,64,64 float16 first 16384".
std::string tuned_problem(const KroneckerCase& one, DType dtype, const Context& context);
/// What a call takes today, by tables or without.
kronecker::Chosen chosen_for(const KroneckerCase& one, DType dtype, const Context& context);
/// Every choice that the op lists, `best` first.
std::vector<kronecker::Config> configs_for(const KroneckerCase& one, DType dtype, const Context& context);

/// Operands on the device, and some elements of the result in float64, computed here from their definition.
class KroneckerContest {
 public:
  KroneckerContest(const KroneckerCase& one, DType dtype, Stopwatch& clock);

  /// Valid as long as this is.
  TuneCandidate candidate(const kronecker::Config& choice);

 private:
  struct Sample {
    std::int64_t line, at;  ///< of y in memory
    double value;
  };
  double reference(std::int64_t n, std::int64_t feature) const;
  Verdict check() const;

  KroneckerCase case_;
  Stopwatch& clock_;
  Context context_;
  KroneckerViews views_;
  Data x_, w_, y_;
  std::vector<std::int64_t> lines_;
  std::vector<Sample> samples_;  ///< by line
  double tolerance_;
};

}  // namespace fretwork::cli
