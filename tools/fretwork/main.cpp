// The program: reads the command line, runs one command, and turns what goes wrong into one line and an exit code.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "fretwork/error.h"

namespace fretwork::cli {
namespace {

constexpr int kFailed = 1, kBadUsage = 2, kInterrupted = 130;

int complain(int code, std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  fmt::print(stderr, "fretwork: {}\n", text);
  return code;
}

/// The innermost command that was typed.
const CLI::App& typed_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : typed_command(*chosen.front());
}

/// "fretwork cache clear".
std::string full_name(const CLI::App& command) {
  const CLI::App* const parent = command.get_parent();
  return parent == nullptr ? command.get_name() : full_name(*parent) + " " + command.get_name();
}

/// A command that is missing or unknown: names those there are.
std::string expected_command(const CLI::App& command) {
  std::string names;
  for (const CLI::App* one : command.get_subcommands([](const CLI::App*) { return true; })) {
    names += (names.empty() ? "" : ", ") + one->get_name();
  }
  const auto extra = command.remaining();
  return fmt::format("expected one of {}, got {}", names, extra.empty() ? "nothing" : extra.front());
}

/// The parser's message in the words of all others: "--n: expected 8 to 128, got 7".
std::string in_our_words(std::string text) {
  static const std::pair<std::regex, const char*> kWords[] = {
      {std::regex(R"((.*): Value (.*) not in range (.*))"), "$1: expected $3, got '$2'"},
      {std::regex(R"((\d)\.0+\b)"), "$1"},  // the bounds of a range
      {std::regex(R"((.*): 1 required .* missing)"), "$1: expected a value, got nothing"},
      {std::regex(R"((.*) is required)"), "$1: expected a value, got nothing"},
      {std::regex(R"((.*): At Most 1 required but received (.*))"), "$1: expected one value, got $2"},
      {std::regex(R"(Could not convert: (.*) = (.*))"), "$1: expected a number, got '$2'"},
      {std::regex(R"((.*) excludes (.*))"), "$1: expected without $2, got both"},
      {std::regex(R"((.*) requires (.*))"), "$1: expected with $2, got it alone"}};
  for (const auto& [theirs, ours] : kWords) {
    text = std::regex_replace(text, theirs, ours);
  }
  return text;
}

/// What is too much comes before what is missing: a mistyped option is often the one that is missed.
std::string problem_of(const CLI::App& command, const CLI::ParseError& error) {
  const CLI::App* owner = &command;  // of what is too much, which may stand before the command
  std::vector<std::string> extra = command.remaining();
  for (; extra.empty() && owner->get_parent() != nullptr; extra = owner->remaining()) {
    owner = owner->get_parent();
  }
  const bool has_commands = !command.get_subcommands([](const CLI::App*) { return true; }).empty();
  const bool misnamed = has_commands && !extra.empty() && !extra.front().starts_with("-");
  if (command.get_require_subcommand_min() > 0 || misnamed) {
    return expected_command(command);
  }
  const auto option = std::ranges::find_if(extra, [](const std::string& word) { return word.starts_with("-"); });
  if (option != extra.end()) {
    return fmt::format("{}: expected an option of {}, got an unknown one", *option, full_name(*owner));
  }
  return extra.empty() ? in_our_words(error.what())
                       : fmt::format("expected nothing more, got '{}'", fmt::join(extra, " "));
}

int explain(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
    return app.exit(error);  // --help and --version
  }
  const CLI::App& command = typed_command(app);
  return complain(kBadUsage, fmt::format("{} (try: {} --help)", problem_of(command, error), full_name(command)));
}

/// An option with an empty value, which would count as not given.
void refuse_empty_values(int argc, char** argv) {
  for (int n = 1; n < argc; ++n) {
    const std::string word = argv[n];
    const bool option = word.starts_with("--") && word.size() > 2;
    if (option && (word.ends_with('=') || (n + 1 < argc && *argv[n + 1] == '\0'))) {
      throw UsageError(word.substr(0, word.find('=')) + ": expected a value, got ''");
    }
  }
}

int run(int argc, char** argv) {
  CLI::App app(
      "Structured sparsity for deep learning: attention patterns, block layouts, Kronecker factors, 2:4, and the "
      "operators on them.",
      "fretwork");
  app.set_version_flag("--version", std::string("fretwork ") + FRETWORK_VERSION);
  app.footer(
      "Examples:\n"
      "  fretwork info\n"
      "  fretwork show 'random_blocks((1,64,64),32,0.1,0)'\n"
      "  fretwork show 'strided(1024,64)|sinks(1024,4,128)'\n"
      "  fretwork advise 4096x14336 --rows 16 --dtype bf16\n"
      "  fretwork bench block --n 2048 --block 32,64 --density 0.5,0.1\n"
      "  fretwork bench kronecker --patterns '6,64,64,1;1,768,192,2' --backward\n"
      "  fretwork tune kronecker\n"
      "  fretwork two_four inspect weights.safetensors\n"
      "  fretwork compile --arch sm_90a\n"
      "Exit codes: 0 done, 1 something failed, 2 bad usage, 130 interrupted. `fretwork COMMAND --help` says more.");
  app.require_subcommand(1);
  add_info(app);
  add_show(app);
  add_advise(app);
  add_bench(app);
  add_tune(app);
  add_report(app);
  add_two_four(app);
  add_compile(app);
  add_cache(app);
  refuse_empty_values(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return explain(app, error);
  }
  return 0;
}

}  // namespace
}  // namespace fretwork::cli

int main(int argc, char** argv) {
  using namespace fretwork::cli;
  // A reader that leaves early (| head) ends the program quietly, also where the parent ignores the signal.
  std::signal(SIGPIPE, SIG_DFL);
  try {
    const int code = run(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return complain(kFailed, std::string("standard output: ") + std::strerror(errno));
    }
    return code;
  } catch (const UsageError& error) {
    return complain(kBadUsage, error.what());
  } catch (const Interrupted& error) {
    return complain(kInterrupted, error.what());
  } catch (const std::bad_alloc&) {
    return complain(kFailed, "not enough memory");
  } catch (const std::exception& error) {
    return complain(kFailed, error.what());
  }
}
