// Finds the fastest of several ways to do the same thing. Knows no op: a candidate is a name and two functions.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/tuned.h"

namespace fretwork {

/// Of one call, over the rounds.
struct Times {
  double ms = 0;   ///< the median
  double std = 0;  ///< the standard deviation
  double mean = 0;
  double iqr = 0;  ///< the interquartile range
  std::vector<double> rounds{};
};
/// `rounds` is not empty.
Times times_of(std::vector<double> rounds);

/// Whether a candidate does the problem at all, and whether its result is right.
struct Verdict {
  bool takes = false, right = false;
  double mse = 0;  ///< mean squared error against the reference
};

struct TuneCandidate {
  std::string name;
  std::function<Verdict()> verify;  ///< called once, before any round; what it throws means a wrong result
  std::function<double()> round;    ///< milliseconds of a call
};

struct Finish {
  std::string name;
  Verdict verdict;
  std::vector<double> rounds;  ///< milliseconds; fewer than the others have when it was dropped
  std::string error;           ///< what verifying threw
  /// Of at least one round.
  Times times() const { return times_of(rounds); }
};

struct RaceOptions {
  int rounds = 9;
  /// Never dropped, and wins unless another beats it: by `margin` in the median, in two rounds of three, and so clearly
  /// that three quarters of its rounds are faster than three quarters of the favourite's.
  std::string favourite;
  double margin = 0.02;
  bool drops = true;  ///< whether slow ones leave early
};

/// Verifies every candidate, then lets those that are right run in turn, round by round, dropping the slow ones early.
/// In the order of the candidates. Nothing when `stop` is set meanwhile.
std::optional<std::vector<Finish>> race(std::span<const TuneCandidate> candidates, const RaceOptions& options,
                                        const std::atomic<bool>& stop);
/// Of those that ran every round. Null when none is right.
const Finish* winner_of(const std::vector<Finish>& finishes, const RaceOptions& options);

/// A table that a run adds rows to. Every row is on the disk when `add` returns, so that a run can be killed at any
/// time and go on from there.
class TuningFile {
 public:
  /// Throws Error when another process has it open like this, or when the file is there and is no table.
  TuningFile(std::filesystem::path file, std::string device, std::string op);
  ~TuningFile();
  TuningFile(const TuningFile&) = delete;
  TuningFile& operator=(const TuningFile&) = delete;

  /// Null when the problem has no row.
  const TunedRow* find(const std::string& problem) const;
  void add(const std::string& problem, TunedRow row);

 private:
  std::string lock_name() const { return file_.string() + ".lock"; }
  void unlock() const;

  std::filesystem::path file_;
  std::string device_, op_;
  int lock_ = -1;
  TunedTable table_;
};

}  // namespace fretwork
