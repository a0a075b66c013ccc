// `fretwork bench attention`: how fast attention is on this machine, pattern by pattern, and how long plans take.
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench.h"
#include "commands.h"
#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "fretwork/patterns.h"
#include "measure.h"
#include "ops/attention/plan.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct AttentionBench {
  std::vector<std::string> patterns, passes = {"forward", "backward"};
  std::int64_t seq = 0, depth = 0, heads = 0, kv_heads = 0, batch = 1;
  bool plans = false;
  RunOptions run;
};

/// The patterns that are measured where none is named, as texts.
std::vector<std::string> usual_patterns(std::int64_t s, bool gpu) {
  const std::int64_t w = gpu ? 512 : 128, stride = gpu ? 128 : 64;
  const std::int64_t height = std::int64_t{1} << ((std::bit_width(static_cast<std::uint64_t>(s)) - 1) / 2);
  std::vector<std::string> texts = {
      fmt::format("full({})", s),
      fmt::format("causal({})", s),
      fmt::format("sliding_window({},{},{})", s, w, w),
      fmt::format("block_local({},{})", s, 2 * w),
      fmt::format("sinks({},4,{})", s, 2 * w),
      fmt::format("dilated({},{},4)", s, w),
      fmt::format("strided({},{})", s, stride),
      fmt::format("fixed({},{},{})", s, stride, stride / 8),
  };
  if (height >= 13 && s % height == 0) {
    texts.push_back(fmt::format("neighborhood(({},{}),13)", height, s / height));
  }
  return texts;
}

/// One pattern's operands and gradients, and calls on them.
class AttentionCase {
 public:
  AttentionCase(const AttentionBench& options, DType dtype, Device device)
      : q_(device, dtype, {options.batch, options.heads, options.seq, options.depth}),
        k_(device, dtype, {options.batch, options.kv_heads, options.seq, options.depth}),
        v_(device, dtype, {options.batch, options.kv_heads, options.seq, options.depth}),
        o_(device, dtype, {options.batch, options.heads, options.seq, options.depth}),
        d_o_(device, dtype, {options.batch, options.heads, options.seq, options.depth}),
        d_q_(device, dtype, {options.batch, options.heads, options.seq, options.depth}),
        d_k_(device, dtype, {options.batch, options.kv_heads, options.seq, options.depth}),
        d_v_(device, dtype, {options.batch, options.kv_heads, options.seq, options.depth}),
        lse_(device, dtype == DType::f64 ? DType::f64 : DType::f32, {options.batch, options.heads, options.seq}) {}

  /// Milliseconds of one pass; a backward one follows a forward one of the same pattern.
  double measure_pass(bool backward, const PatternPtr& pattern, Stopwatch& clock) {
    Context context = clock.context();
    const auto forward = [&] { attention(q_.view(), k_.view(), v_.view(), pattern, o_.view(), lse_.view(), context); };
    if (!backward) {
      return clock.cold(forward).ms;
    }
    forward();
    const AttentionGradients gradients{d_q_.view(), d_k_.view(), d_v_.view(), {}};
    return clock
        .cold([&] {
          attention_backward(q_.view(), k_.view(), v_.view(), pattern, o_.view(), lse_.view(), d_o_.view(), {},
                             gradients, context);
        })
        .ms;
  }

 private:
  Data q_, k_, v_, o_, d_o_, d_q_, d_k_, d_v_, lse_;
};

void check_passes(const AttentionBench& options) {
  for (const std::string& pass : options.passes) {
    if (pass != "forward" && pass != "backward") {
      throw UsageError("bench: --pass: expected forward or backward, got " + pass);
    }
  }
  if (options.heads % options.kv_heads != 0) {
    throw UsageError(fmt::format("bench: --kv-heads: expected a number that divides the {} heads, got {}",
                                 options.heads, options.kv_heads));
  }
}

std::vector<PatternPtr> chosen_regular(const AttentionBench& options, bool gpu) {
  std::vector<PatternPtr> found;
  for (const std::string& text : options.patterns.empty() ? usual_patterns(options.seq, gpu) : options.patterns) {
    try {
      found.push_back(parse_pattern(text));
    } catch (const Error& error) {
      throw UsageError(fmt::format("bench: --pattern: {}", error.what()));
    }
    const auto shape = found.back()->shape();
    if (shape.size() != 2 || shape[0] != options.seq || shape[1] != options.seq) {
      throw UsageError(
          fmt::format("bench: --pattern: expected a pattern of {} positions (--seq), got {}", options.seq, text));
    }
  }
  return found;
}

/// GFLOP/s on the pattern's elements: two products forward, five backward.
double rate_of(const AttentionBench& options, const Pattern& pattern, bool backward, double ms) {
  const double elements = pattern.density() * static_cast<double>(options.seq) * static_cast<double>(options.seq);
  const auto many = static_cast<double>(options.batch * options.heads * options.depth);
  return (backward ? 10 : 4) * elements * many / ms * 1e-6;
}

/// Milliseconds of its FLOPs at the rate of full attention, or of moving the operands once at the rate of a copy.
constexpr const char* kFloor =
    "Floor: the FLOPs at the rate of the same pass with every key, or the operands moved once at the rate of a copy.";

double floor_of(const AttentionBench& options, const Pattern& pattern, bool backward, DType dtype, double full_rate,
                double copy_rate) {
  const auto positions = static_cast<double>(options.batch * options.seq * options.depth);
  const double moved = 2 * static_cast<double>(options.heads + options.kv_heads) * positions * (backward ? 2 : 1);
  const double products = rate_of(options, pattern, backward, 1) / full_rate;
  return std::max(products, moved * static_cast<double>(size_of(dtype)) / copy_rate);
}

/// What the user left out, by the machine.
void fill_in(AttentionBench& options, bool gpu) {
  const auto unless_given = [](std::int64_t& value, std::int64_t usual) { value = value > 0 ? value : usual; };
  unless_given(options.seq, gpu ? 16384 : 2048);
  unless_given(options.depth, gpu ? 128 : 64);
  unless_given(options.heads, gpu ? 16 : 4);
  unless_given(options.kv_heads, options.heads);
}

void bench_patterns(AttentionBench options) {
  Run run(options.run);
  const bool gpu = run.device().type == DeviceType::cuda;
  fill_in(options, gpu);
  check_passes(options);
  const std::vector<PatternPtr> patterns = chosen_regular(options, gpu);
  const PatternPtr full = patterns::full(options.seq);
  Stopwatch clock(run.device(), run.executor(), run.rounds());
  AttentionCase one(options, run.dtype(), run.device());
  fmt::print("{}, {}, batch {}, {} heads ({} of keys), {} positions, depth {}, median of {} rounds\n", run.machine(),
             name_of(run.dtype()), options.batch, options.heads, options.kv_heads, options.seq, options.depth,
             run.rounds());
  fmt::print(
      "of full: of the rate of the same pass with every key, measured in this run; rates count the pattern's "
      "elements\n");
  fmt::print("{:<9} {:>8} {:>10} {:>17} {:>8}  {}\n", "pass", "density", "ms", "rate", "of full", "pattern");
  run.csv("device,dtype,threads,pass,batch,heads,kv_heads,seq,depth,density,ms,gflops,share,pattern");
  Json rows = Json::array();
  const double copy_rate = clock.copy_rate();
  Progress progress(static_cast<int>(patterns.size() * options.passes.size()), run.explains());
  for (const std::string& pass : options.passes) {
    const bool backward = pass == "backward";
    const double full_ms = one.measure_pass(backward, full, clock);
    const double all = rate_of(options, *full, backward, full_ms);
    for (const PatternPtr& pattern : patterns) {
      progress.show(pass + " " + pattern->text().substr(0, 60));
      clock.explain(run.explains());
      const double ms = one.measure_pass(backward, pattern, clock);
      clock.explain(false);
      const double rate = rate_of(options, *pattern, backward, ms);
      progress.hide();
      fmt::print("{:<9} {:>8.4f} {:>10.3f} {:>9.1f} GFLOP/s {:>6.1f} %  {}\n", pass, pattern->density(), ms, rate,
                 100 * rate / all, pattern->text());
      std::fflush(stdout);
      run.csv(fmt::format("{},{},{},{},{},{},{},{},{},{:.6g},{:.6g},{:.6g},{:.4f},\"{}\"", name_of(run.device()),
                          name_of(run.dtype()), run.threads(), pass, options.batch, options.heads, options.kv_heads,
                          options.seq, options.depth, pattern->density(), ms, rate, rate / all, pattern->text()));
      rows.push_back({{"pattern", pattern->text()},
                      {"pass", pass},
                      {"seq", options.seq},
                      {"batch", options.batch},
                      {"heads", options.heads},
                      {"kv_heads", options.kv_heads},
                      {"depth", options.depth},
                      {"density", pattern->density()},
                      {"ms", ms},
                      {"gflops", rate},
                      {"share", rate / all},
                      {"full_ms", full_ms},
                      {"floor_ms", floor_of(options, *pattern, backward, run.dtype(), all, copy_rate)}});
      progress.advance();
    }
  }
  run.finish({{"batch", options.batch}, {"positions", options.seq}, {"heads", options.heads}, {"depth", options.depth}},
             rows,
             {{.title = "Time of each pattern",
               .labels = {"pass", "pattern"},
               .series = {{"ms", "this pattern"}, {"full_ms", "every key"}, {"floor_ms", "floor"}},
               .note = kFloor}});
}

/// Patterns of 2²⁰ tokens by name; the number makes another one of the same kind, which is not planned yet.
struct LongPattern {
  const char* name;
  std::function<RegularPtr(std::int64_t)> make;
};

std::vector<LongPattern> long_patterns() {
  constexpr std::int64_t kLong = 1 << 20;
  const auto lengths = [](std::int64_t n, std::int64_t least, std::int64_t more) {
    std::vector<std::int64_t> found;
    std::int64_t rest = kLong;
    for (std::int64_t state = n; rest > 0; state = (state * 48271 + 11) % 2147483647) {
      found.push_back(std::min(least + state % more, rest));
      rest -= found.back();
    }
    return found;
  };
  return {
      {"causal window 4096", [](std::int64_t n) { return patterns::sliding_window(kLong, 4095 + n, 0); }},
      {"window ±512", [](std::int64_t n) { return patterns::sliding_window(kLong, 512 + n, 512); }},
      {"strided 1024", [](std::int64_t n) { return patterns::strided(kLong, 1024 + 8 * n); }},
      {"dilated 512 × 4", [](std::int64_t n) { return patterns::dilated(kLong, 512 + n, 4); }},
      {"sinks 4, window 4096", [](std::int64_t n) { return patterns::sinks(kLong, 4, 4096 + n); }},
      {"neighbourhood 13 of 1024 × 1024",
       [](std::int64_t n) {
         const std::int64_t shape[] = {1024, 1024}, window[] = {13 + 2 * n}, one[] = {1}, none[] = {0};
         return patterns::neighborhood(shape, window, one, none);
       }},
      {"neighbourhood 7 of 64 × 128 × 128",
       [](std::int64_t n) {
         const std::int64_t shape[] = {64, 128, 128 + n}, window[] = {7}, one[] = {1}, none[] = {0};
         return patterns::neighborhood(shape, window, one, none);
       }},
      {"documents of 300 to 3300, causal",
       [lengths](std::int64_t n) { return patterns::document(lengths(n, 300, 3000), /*causal=*/true); }},
      {"documents of 10 to 100, causal",
       [lengths](std::int64_t n) { return patterns::document(lengths(n, 10, 91), /*causal=*/true); }},
      {"bigbird, blocks of 64", [](std::int64_t n) { return patterns::bigbird(kLong, 64, 1, 2, 3, 5 + n); }},
  };
}

void bench_plans(const AttentionBench& options) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begin) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  };
  RunOptions on_cpu = options.run;
  on_cpu.device = "cpu";
  Run run(on_cpu);
  constexpr attention_op::TileShape kShape{128, 128};
  fmt::print("{}; 1,048,576 tokens, tiles of 128 × 128, median of {} patterns of each kind\n", run.machine(),
             run.rounds());
  fmt::print("{:<34} {:>9} {:>9} {:>14} {:>10}\n", "pattern", "made ms", "plan ms", "transposed ms", "plan");
  run.csv("pattern,make_ms,plan_ms,transposed_ms,bytes");
  Json rows = Json::array();
  for (const LongPattern& pattern : long_patterns()) {
    std::vector<double> made, planned, transposed;
    double bytes = 0;
    for (int n = 0; n < run.rounds(); ++n) {
      auto begin = Clock::now();
      const RegularPtr regular = pattern.make(n);
      made.push_back(since(begin));
      begin = Clock::now();
      bytes = static_cast<double>(attention_op::plan(*regular, kShape)->bytes());
      planned.push_back(since(begin));
      begin = Clock::now();
      attention_op::transposed_plan(*regular, kShape);
      transposed.push_back(since(begin));
    }
    const double ms[] = {times_of(std::move(made)).ms, times_of(std::move(planned)).ms,
                         times_of(std::move(transposed)).ms};
    fmt::print("{:<34} {:>9.3f} {:>9.3f} {:>14.3f} {:>10}\n", pattern.name, ms[0], ms[1], ms[2], bytes_text(bytes));
    run.csv(fmt::format("\"{}\",{:.6g},{:.6g},{:.6g},{:.0f}", pattern.name, ms[0], ms[1], ms[2], bytes));
    rows.push_back({{"pattern", pattern.name},
                    {"make_ms", ms[0]},
                    {"plan_ms", ms[1]},
                    {"transposed_ms", ms[2]},
                    {"bytes", bytes}});
  }
  run.finish({{"plans", true}}, rows,
             {{.title = "Time of making and planning",
               .labels = {"pattern"},
               .series = {{"plan_ms", "plan"}, {"make_ms", "pattern"}, {"transposed_ms", "plan for the gradient"}}}});
}

}  // namespace

void add_bench_attention(CLI::App& bench_command) {
  const auto options = std::make_shared<AttentionBench>();
  CLI::App* const command = bench_command.add_subcommand("attention", "Attention over regular patterns");
  const auto size = CLI::Range(std::int64_t{1}, std::int64_t{1} << 40).description("");
  command->add_option("--pattern", options->patterns, "Texts of patterns; several after one another (a usual set)");
  command->add_option("--seq", options->seq, "Positions (2048; on CUDA 16384)")->check(size);
  command->add_option("--depth", options->depth, "Of a head (64; on CUDA 128)")->check(size);
  command->add_option("--heads", options->heads, "Query heads (4; on CUDA 16)")->check(size);
  command->add_option("--kv-heads", options->kv_heads, "Heads of keys and values (as many)")->check(size);
  command->add_option("--batch", options->batch, "Batch (1)")->check(size);
  command->add_option("--pass", options->passes, "forward, backward (both)")->delimiter(',');
  command->add_flag("--plans", options->plans, "How long patterns of a million tokens take to make and to plan");
  add_run_options(*command, options->run);
  add_explain_option(*command, options->run);
  command->footer(
      "The rate counts the pattern's elements, two products forward and five backward. It is set against the same\n"
      "pass with every key, so 100 % means that what is left out costs nothing.\n"
      "Examples:\n"
      "  fretwork bench attention\n"
      "  fretwork bench attention --seq 4096 --pattern 'strided(4096,64)' 'sinks(4096,4,512)' --pass forward\n"
      "  fretwork bench attention --device cuda:0 --dtype bfloat16 --csv attention.csv\n"
      "  fretwork bench attention --device cuda:0 --pattern 'causal(16384)' --explain\n"
      "  fretwork bench attention --plans");
  command->callback([options] { options->plans ? bench_plans(*options) : bench_patterns(*options); });
}

}  // namespace fretwork::cli
