// The commands of the program. Each adds itself to the command line; its work runs when it is the one that was typed.
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>

namespace fretwork::cli {

/// The user typed something that cannot be meant: exit code 2. Everything else that is thrown means exit code 1.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The user stopped it: exit code 130, as shells have it.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void add_info(CLI::App& app);
void add_show(CLI::App& app);
void add_advise(CLI::App& app);
void add_bench(CLI::App& app);
void add_tune(CLI::App& app);
void add_report(CLI::App& app);
void add_two_four(CLI::App& app);
void add_compile(CLI::App& app);
void add_cache(CLI::App& app);

}  // namespace fretwork::cli
