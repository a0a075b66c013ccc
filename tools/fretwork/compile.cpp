// `fretwork compile`: fills the kernel cache for an architecture, with or without a GPU of it.
#include <fmt/core.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "commands.h"
#include "fretwork/error.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct CompileOptions {
  std::string arch, match;
  std::vector<std::string> ops;
  bool no_spills = false, json = false;
};

struct Outcome {
  ListedKernel kernel;
  KernelReport report;
  bool from_disk = false;
  std::string failure;

  /// wgmma products that ptxas made wait for each other: the kernel is right, and slow.
  bool serialised() const { return report.log.find("are serialized") != report.log.npos; }
};

/// Without the namespace that every one of them has.
std::string short_name(const KernelSpec& spec) {
  return std::regex_replace(spec.instance, std::regex("fretwork::"), "");
}

std::vector<Outcome> listed(const CompileOptions& options) {
  if (!std::regex_match(options.arch, std::regex("sm_(75|[89][0-9]|1[0-9]{2})[af]?"))) {
    throw UsageError(
        "compile: --arch: expected an architecture from sm_75 on (NVRTC 13 compiles for no older one), such as sm_90a, "
        "got " +
        options.arch);
  }
  const auto wanted = [&](const ListedKernel& kernel) {
    const bool of_op =
        options.ops.empty() || std::find(options.ops.begin(), options.ops.end(), kernel.op) != options.ops.end();
    return of_op && short_name(kernel.spec).find(options.match) != std::string::npos;
  };
  std::vector<Outcome> chosen;
  std::set<std::string> known;
  for (ListedKernel& kernel : all_kernels(options.arch)) {
    known.insert(kernel.op);
    if (wanted(kernel)) {
      chosen.push_back({std::move(kernel), {}, false, {}});
    }
  }
  for (const std::string& op : options.ops) {
    if (!known.contains(op)) {
      std::string names;
      for (const std::string& name : known) {
        names += (names.empty() ? "" : ", ") + name;
      }
      throw UsageError(fmt::format("compile: --op: expected one of {}, got {}", names, op));
    }
  }
  if (known.empty()) {
    throw UsageError("compile: --arch: expected one that there are kernels for (sm_75 and later), got " + options.arch);
  }
  if (chosen.empty()) {
    throw UsageError("compile: --match: expected a part of a kernel's name, got " + options.match);
  }
  return chosen;
}

void compile_one(Outcome& outcome, const std::string& arch) {
  try {
    CompiledKernel compiled = compile_kernel(outcome.kernel.spec, arch);
    outcome.report = std::move(compiled.report);
    outcome.from_disk = compiled.from_disk;
  } catch (const std::exception& error) {
    outcome.failure = error.what();
  }
}

void compile_all(std::vector<Outcome>& outcomes, const std::string& arch) {
  Progress progress(static_cast<int>(outcomes.size()));
  std::mutex mutex;
  tbb::parallel_for(
      tbb::blocked_range<std::size_t>(0, outcomes.size(), 1),
      [&](const auto& range) {
        for (std::size_t n = range.begin(); n < range.end(); ++n) {
          compile_one(outcomes[n], arch);
          const std::lock_guard lock(mutex);
          progress.advance();
          progress.show(outcomes[n].kernel.op);
        }
      },
      tbb::simple_partitioner{});
}

void print_table(const std::vector<Outcome>& outcomes) {
  std::size_t width = 6;
  for (const Outcome& o : outcomes) {
    width = std::max(width, short_name(o.kernel.spec).size());
  }
  fmt::print("{:<14} {:<{}} {:>5} {:>7} {:>7} {:>8} {:>7}  {}\n", "op", "kernel", width, "regs", "spills", "static",
             "dynamic", "ms", "from");
  for (const Outcome& o : outcomes) {
    const KernelReport& r = o.report;
    fmt::print("{:<14} {:<{}} ", o.kernel.op, short_name(o.kernel.spec), width);
    if (o.failure.empty()) {
      const int dynamic = o.kernel.spec.dynamic_shared;
      fmt::print("{:>5} {:>7} {:>7} {:>8} {:>7.0f}  {}{}\n", r.registers, r.spill_bytes, r.static_shared_bytes,
                 dynamic == KernelSpec::kBySize ? "by size" : std::to_string(dynamic), r.compile_ms,
                 o.from_disk ? "cache" : "NVRTC", o.serialised() ? ", products serialised" : "");
    } else {
      fmt::print("failed\n");
    }
  }
}

void print_json(const std::vector<Outcome>& outcomes, const std::string& arch) {
  auto rows = nlohmann::ordered_json::array();
  for (const Outcome& o : outcomes) {
    const KernelReport& r = o.report;
    rows.push_back({{"op", o.kernel.op},
                    {"source", o.kernel.spec.source},
                    {"kernel", o.kernel.spec.instance},
                    {"registers", r.registers},
                    {"spill_bytes", r.spill_bytes},
                    {"stack_bytes", r.stack_bytes},
                    {"static_shared_bytes", r.static_shared_bytes},
                    {"dynamic_shared_bytes", o.kernel.spec.dynamic_shared == KernelSpec::kBySize
                                                 ? nlohmann::ordered_json()
                                                 : nlohmann::ordered_json(o.kernel.spec.dynamic_shared)},
                    {"serialised", o.serialised()},
                    {"ms", r.compile_ms},
                    {"from_cache", o.from_disk},
                    {"error", o.failure.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(o.failure)}});
  }
  fmt::print("{}\n", nlohmann::ordered_json{{"arch", arch}, {"kernels", rows}}.dump(2));
}

void compile(const CompileOptions& options) {
  std::vector<Outcome> outcomes = listed(options);
  nvrtc::version();  // throws where there is none, else every kernel would say so
  compile_all(outcomes, options.arch);
  const auto count = [&](const auto& accept) { return std::count_if(outcomes.begin(), outcomes.end(), accept); };
  const auto failed = count([](const Outcome& o) { return !o.failure.empty(); });
  const auto spilling = count([](const Outcome& o) { return o.report.spill_bytes > 0; });
  const auto cached = count([](const Outcome& o) { return o.from_disk; });
  std::set<std::string> failures;  // one cause may fail many
  for (const Outcome& o : outcomes) {
    if (!o.failure.empty()) {
      failures.insert(o.failure);
    }
  }
  if (options.json) {
    print_json(outcomes, options.arch);
  } else {
    print_table(outcomes);
    for (const std::string& failure : failures) {
      fmt::print("\n{}\n", failure);
    }
    fmt::print("{} kernels for {}: {} compiled, {} from the cache, {} failed, {} with spills\n", outcomes.size(),
               options.arch, std::ssize(outcomes) - cached - failed, cached, failed, spilling);
  }
  if (failed > 0) {
    throw Error(fmt::format("compile: {} of {} kernels failed", failed, outcomes.size()));
  }
  if (options.no_spills && spilling > 0) {
    throw Error(fmt::format("compile: {} of {} kernels spill registers", spilling, outcomes.size()));
  }
}

}  // namespace

void add_compile(CLI::App& app) {
  const auto options = std::make_shared<CompileOptions>();
  CLI::App* const command =
      app.add_subcommand("compile", "Compile every kernel for an architecture into the cache; needs no GPU");
  command->add_option("--arch", options->arch, "The architecture: sm_75 and later, sm_90a for Hopper")->required();
  command->add_option("--op", options->ops, "Only the kernels of these ops")->delimiter(',');
  command->add_option("--match", options->match, "Only kernels whose name contains this");
  command->add_flag("--no-spills", options->no_spills, "Exit with 1 if a kernel spills registers");
  command->add_flag("--json", options->json, "The table as JSON");
  command->footer(
      "Columns: registers per thread, bytes spilled, bytes of shared memory, static and asked for at a launch (by "
      "size:\n"
      "the problem decides), milliseconds to compile.\n"
      "Examples:\n"
      "  fretwork compile --arch sm_90a\n"
      "  fretwork compile --arch sm_80 --op block_matmul --no-spills\n"
      "  fretwork compile --arch sm_90a --match 'simple_spmm<bf16' --json");
  command->callback([options] { compile(*options); });
}

}  // namespace fretwork::cli
