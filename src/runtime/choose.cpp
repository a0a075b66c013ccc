#include "runtime/choose.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "runtime/cuda_driver.h"

namespace fretwork {
namespace {

std::atomic<bool>& switched() {
  static std::atomic<bool> on = [] {
    const char* const set = std::getenv("FRETWORK_EXPLAIN");
    return set != nullptr && *set != '\0' && std::string_view(set) != "0";
  }();
  return on;
}

std::string with_unit(double microseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f µs", microseconds);
  return text;
}

}  // namespace

bool explains() { return switched().load(std::memory_order_relaxed); }
void explain_calls(bool yes) { switched() = yes; }

void explain(const Context& context, const std::string& problem, std::vector<Explained> candidates,
             const std::string& taken, const std::function<void()>& call) {
  std::string text = "fretwork: " + problem + "\n";
  std::ranges::stable_sort(candidates, {}, &Explained::microseconds);
  for (const auto& [name, microseconds] : candidates) {
    text += "  " + name + ": expected " + with_unit(microseconds) + (name == taken ? ", taken" : "") + "\n";
  }
  if (cuda::is_capturing(context.stream)) {
    call();
    text += "  captured into a graph, not timed\n";
  } else {
    call();  // compiles the kernel if it is new
    cuda::Timer timer;
    timer.start(context.stream);
    call();
    text += "  took " + with_unit(1e3 * static_cast<double>(timer.stop(context.stream))) + "\n";
  }
  std::fputs(text.c_str(), stderr);
}

}  // namespace fretwork
