// What the suites of `fretwork tune` share: where tables lie, what a race says, and how a run is stopped.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/tuner.h"

namespace fretwork::cli {

/// The user's table of an op on a device. Throws UsageError when the user has no folder for it.
std::filesystem::path usual_table(const std::string& op, const std::string& device);

/// Set by the first SIGINT or SIGTERM after this call; the next one ends the program at once.
const std::atomic<bool>& stopped_by_user();

/// The row of a race whose heuristic stands first. Throws Error when `winner` is null, no candidate being right; those
/// that were wrong are named on standard error.
TunedRow row_of(const std::string& problem, std::int64_t batch, const std::vector<Finish>& finishes,
                const Finish* winner);

void add_tune_kronecker(CLI::App& tune);

}  // namespace fretwork::cli
