// The race, and the file that its results go to.
#include "runtime/tuner.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <numeric>
#include <utility>

#include "fretwork/error.h"

namespace fretwork {
namespace {

/// How many times slower than the leader a candidate's best round may be after so many rounds.
double slack(int rounds) { return rounds == 1 ? 2.0 : rounds == 2 ? 1.3 : 1.1; }

bool is_right(const Finish& finish) { return finish.verdict.takes && finish.verdict.right; }

Finish verified(const TuneCandidate& candidate) {
  Finish finish{candidate.name, {}, {}, {}};
  try {
    finish.verdict = candidate.verify();
  } catch (const std::exception& error) {
    finish.verdict = {.takes = true, .right = false, .mse = 0};
    finish.error = error.what();
  }
  return finish;
}

/// Whether it may run another round, `count` being behind it.
std::vector<bool> still_running(const std::vector<Finish>& finishes, std::size_t count, const std::string& favourite) {
  double leader = std::numeric_limits<double>::max();
  for (const Finish& one : finishes) {
    leader = one.rounds.size() == count ? std::min(leader, one.times().ms) : leader;
  }
  std::vector<bool> running;
  for (const Finish& one : finishes) {
    const bool all = one.rounds.size() == count;
    const double limit = slack(static_cast<int>(count)) * leader;
    running.push_back(all && (one.name == favourite || *std::ranges::min_element(one.rounds) <= limit));
  }
  return running;
}

/// The round that a quarter of all, from the fast end or from the slow one, do not reach.
double quartile(std::vector<double> rounds, bool slow) {
  std::ranges::sort(rounds);
  const std::size_t quarter = rounds.size() / 4;
  return rounds[slow ? rounds.size() - 1 - quarter : quarter];
}

/// By the median, round by round, and by more than the rounds of either spread: on a busy machine noise wins medians.
bool beats(const Finish& one, const Finish& favourite, double margin) {
  std::size_t ahead = 0;
  for (std::size_t n = 0; n < one.rounds.size(); ++n) {
    ahead += one.rounds[n] < favourite.rounds[n] ? 1 : 0;
  }
  return one.times().ms * (1 + margin) < favourite.times().ms && 3 * ahead >= 2 * one.rounds.size() &&
         quartile(one.rounds, true) < quartile(favourite.rounds, false);
}

/// Between two rounds where it falls there, as NumPy has it. `sorted` is not empty.
double percentile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const double above = sorted[std::min(below + 1, sorted.size() - 1)];
  return sorted[below] + (at - static_cast<double>(below)) * (above - sorted[below]);
}

/// Held by this process alone; -1 when another has it. Throws Error.
int lock_file(const std::string& name) {
  for (;;) {
    const int descriptor = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor < 0) {
      throw Error(name + ": cannot be written: " + std::strerror(errno));
    }
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
      close(descriptor);
      return -1;
    }
    struct stat held {
    }, there{};
    if (fstat(descriptor, &held) == 0 && stat(name.c_str(), &there) == 0 && held.st_ino == there.st_ino) {
      return descriptor;
    }
    close(descriptor);  // the one before has just removed it
  }
}

}  // namespace

Times times_of(std::vector<double> rounds) {
  const auto count = static_cast<double>(rounds.size());
  const double mean = std::accumulate(rounds.begin(), rounds.end(), 0.0) / count;
  double squares = 0;
  for (const double ms : rounds) {
    squares += (ms - mean) * (ms - mean);
  }
  std::vector<double> sorted = rounds;
  std::ranges::sort(sorted);
  return {.ms = sorted[sorted.size() / 2],
          .std = std::sqrt(squares / count),
          .mean = mean,
          .iqr = percentile(sorted, 0.75) - percentile(sorted, 0.25),
          .rounds = std::move(rounds)};
}

std::optional<std::vector<Finish>> race(std::span<const TuneCandidate> candidates, const RaceOptions& options,
                                        const std::atomic<bool>& stop) {
  std::vector<Finish> finishes;
  std::vector<bool> running;
  for (const TuneCandidate& candidate : candidates) {
    if (stop) {
      return std::nullopt;
    }
    finishes.push_back(verified(candidate));
    running.push_back(is_right(finishes.back()));
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t n = 0; n < candidates.size(); ++n) {
      if (stop) {
        return std::nullopt;
      }
      if (running[n]) {
        finishes[n].rounds.push_back(candidates[n].round());
      }
    }
    if (options.drops) {
      running = still_running(finishes, static_cast<std::size_t>(round) + 1, options.favourite);
    }
  }
  return finishes;
}

const Finish* winner_of(const std::vector<Finish>& finishes, const RaceOptions& options) {
  std::vector<const Finish*> all;
  const Finish* favourite = nullptr;
  for (const Finish& one : finishes) {
    if (is_right(one) && std::ssize(one.rounds) == options.rounds) {
      all.push_back(&one);
      favourite = one.name == options.favourite ? &one : favourite;
    }
  }
  std::ranges::stable_sort(all, {}, [](const Finish* one) { return one->times().ms; });
  for (const Finish* const one : all) {
    if (favourite == nullptr || beats(*one, *favourite, options.margin)) {
      return one;
    }
  }
  return favourite;
}

TuningFile::TuningFile(std::filesystem::path file, std::string device, std::string op)
    : file_(std::move(file)), device_(std::move(device)), op_(std::move(op)) {
  if (file_.has_parent_path()) {
    std::error_code ignored;  // opening will say it
    std::filesystem::create_directories(file_.parent_path(), ignored);
  }
  lock_ = lock_file(lock_name());
  if (lock_ < 0) {
    throw Error(file_.string() + ": expected no other process to write it, got one that does");
  }
  try {
    table_ = TunedTable::read(file_);
  } catch (...) {
    unlock();
    throw;
  }
}

TuningFile::~TuningFile() { unlock(); }

void TuningFile::unlock() const {
  unlink(lock_name().c_str());
  close(lock_);
}

const TunedRow* TuningFile::find(const std::string& problem) const {
  const TunedTable::Rows* const rows = table_.find(device_, op_);
  const auto row = rows != nullptr ? rows->find(problem) : TunedTable::Rows::const_iterator();
  return rows != nullptr && row != rows->end() ? &row->second : nullptr;
}

void TuningFile::add(const std::string& problem, TunedRow row) {
  table_.rows(device_, op_)[problem] = std::move(row);
  table_.write(file_);
}

}  // namespace fretwork
