// `fretwork cache`: the folder of compiled kernels.
#include <fmt/core.h>

#include "commands.h"
#include "runtime/kernels.h"
#include "terminal.h"

namespace fretwork::cli {

void add_cache(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("cache", "The compiled kernels on disk");
  CLI::App* const clear = command->add_subcommand("clear", "Remove every cached kernel");
  command->footer("Examples:\n  fretwork cache\n  FRETWORK_CACHE_DIR=/tmp/kernels fretwork cache clear");
  clear->footer("");
  clear->callback([] {
    const std::int64_t removed = disk_cache::clear();
    fmt::print("removed {} kernel{}\n", count_text(removed), removed == 1 ? "" : "s");
  });
  command->callback([clear] {
    if (clear->parsed()) {
      return;
    }
    const disk_cache::State state = disk_cache::state();
    fmt::print("folder   {}\n", state.folder.empty() ? "none: kernels are not kept" : state.folder.string());
    fmt::print("kernels  {}\n", count_text(state.files));
    fmt::print("size     {} of at most {}\n", bytes_text(static_cast<double>(state.bytes)),
               bytes_text(static_cast<double>(state.limit)));
  });
}

}  // namespace fretwork::cli
