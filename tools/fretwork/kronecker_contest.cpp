// Samples of the result: whole lines are read back and looked at for NaN, some elements of each are recomputed.
#include "kronecker_contest.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace fretwork::cli {
namespace {

using kronecker::Config;

}  // namespace

std::string tuned_problem(const KroneckerCase& one, DType dtype, const Context& context) {
  const KroneckerViews views(one, dtype, context.device);
  // Both layouts have a place.
  return text_of(*bucket_of(kronecker::make_problem(views.x, views.w, views.y), context));
}

kronecker::Chosen chosen_for(const KroneckerCase& one, DType dtype, const Context& context) {
  const KroneckerViews views(one, dtype, context.device);
  return chosen(kronecker::make_problem(views.x, views.w, views.y), context);
}

std::vector<Config> configs_for(const KroneckerCase& one, DType dtype, const Context& context) {
  const KroneckerViews views(one, dtype, context.device);
  std::vector<Config> list{Config{}};
  const auto others = candidates(kronecker::make_problem(views.x, views.w, views.y), context);
  list.insert(list.end(), others.begin(), others.end());
  return list;
}

KroneckerContest::KroneckerContest(const KroneckerCase& one, DType dtype, Stopwatch& clock)
    : case_(one),
      clock_(clock),
      context_(clock.context()),
      views_(one, dtype, clock.device()),
      x_(clock.device(), dtype, {views_.x.elements()}),
      w_(clock.device(), dtype, {views_.w.elements()}),
      y_(clock.device(), dtype, {views_.y.elements()}),
      tolerance_(tolerance_of(dtype, context_.precision)) {
  views_.x.data = x_.view().data;
  views_.w.data = w_.view().data;
  views_.y.data = y_.view().data;
  std::mt19937 random(1);
  const int along = one.bs_last ? 0 : 1;  // the axis of y that a line runs along
  lines_ = sample_places(views_.y.size(1 - along), 32, random);
  const auto places = sample_places(views_.y.size(along), 128, random);
  for (const std::int64_t line : lines_) {
    for (const std::int64_t at : places) {
      samples_.push_back({line, at, one.bs_last ? reference(at, line) : reference(line, at)});
    }
  }
}

double KroneckerContest::reference(std::int64_t n, std::int64_t feature) const {
  const auto& [a, b, c, d] = case_.pattern;
  const std::int64_t i = feature / (b * d), j = feature / d % b, l = feature % d;
  double sum = 0;
  for (std::int64_t k = 0; k < c; ++k) {
    sum += w_.drawn(((i * b + j) * c + k) * d + l) *
           x_.drawn(n * views_.x.stride(0) + ((i * c + k) * d + l) * views_.x.stride(1));
  }
  return sum;
}

Verdict KroneckerContest::check() const {
  const std::int64_t length = views_.y.size(case_.bs_last ? 0 : 1);
  double squares = 0, largest = 0, worst = 0;
  bool finite = true;
  auto sample = samples_.begin();
  for (const std::int64_t line : lines_) {
    const std::vector<double> found = y_.read(line * length, length);
    finite = finite && std::ranges::all_of(found, [](double y) { return std::isfinite(y); });
    for (; sample != samples_.end() && sample->line == line; ++sample) {
      const double error = std::abs(found[static_cast<std::size_t>(sample->at)] - sample->value);
      squares += error * error;
      worst = std::max(worst, error);
      largest = std::max(largest, std::abs(sample->value));
    }
  }
  return {true, finite && worst <= tolerance_ * largest, squares / static_cast<double>(samples_.size())};
}

TuneCandidate KroneckerContest::candidate(const Config& choice) {
  const auto call = [this, choice] {
    return run(kronecker::make_problem(views_.x, views_.w, views_.y), context_, choice);
  };
  const auto verify = [this, call] {
    y_.clear();
    return call() ? check() : Verdict{};
  };
  const auto round = [this, call, calls = 0]() mutable {
    calls = calls > 0 ? calls : clock_.calls_for(call);
    return clock_.cold_round(call, calls);
  };
  return {text_of(choice), verify, round};
}

}  // namespace fretwork::cli
