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

Machine machine_of(const Context& context) {
  const int device = context.device.index;
  return {cuda::kernel_arch(device),  cuda::arch_number(device), cuda::device_info(device).multiprocessors,
          cuda::shared_limit(device), context.precision,         device};
}

Machine typical_machine(const std::string& arch, Precision precision) {
  const int number = cuda::arch_number(arch);
  // An H100 or H200, an A100, an RTX 3090 or 4090, a T4.
  const auto [multiprocessors, kilobytes] = number >= 90   ? std::pair{132, 227}
                                            : number == 80 ? std::pair{108, 163}
                                            : number > 80  ? std::pair{84, 99}
                                                           : std::pair{40, 64};
  return {arch, number, multiprocessors, kilobytes << 10, precision};
}

std::int64_t settings_of(DType dtype, const Context& context) {
  const std::string arch = cuda::kernel_arch(context.device.index);  // which FRETWORK_ARCH may change
  return static_cast<std::int64_t>(dtype) | static_cast<std::int64_t>(context.precision) << 8 |
         std::int64_t{cuda::arch_number(arch)} << 16 | std::int64_t{arch.ends_with('a')} << 31 |
         std::int64_t{context.device.index} << 32;
}

std::int64_t address_bits(std::initializer_list<const void*> addresses) {
  std::int64_t bits = 0;
  for (const void* const address : addresses) {
    bits = bits << 4 | static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address) % 16);
  }
  return bits;
}

bool explains() { return switched().load(std::memory_order_relaxed); }
void explain_calls(bool yes) { switched() = yes; }

void explain(const Context& context, const std::string& problem, std::vector<Explained> candidates,
             const std::function<std::string()>& call, bool writes_over_operands) {
  std::string taken, time = "captured into a graph, not timed";
  if (cuda::is_capturing(context.stream)) {
    taken = call();
  } else {
    // Several calls in a row keep the host ahead of the GPU, so that launching is not part of the time.
    const int calls = writes_over_operands ? 1 : 10;
    if (!writes_over_operands) {
      call();  // compiles the kernel if it is new
    }
    cuda::Timer timer;
    timer.start(context.stream);
    for (int n = 0; n < calls; ++n) {
      taken = call();
    }
    time = "took " + with_unit(1e3 * static_cast<double>(timer.stop(context.stream)) / calls);
    time += writes_over_operands ? ", called once: compiling and launching may be part of it" : "";
  }
  std::string text = "fretwork: " + problem + "\n";
  std::ranges::stable_sort(candidates, {}, &Explained::microseconds);
  for (const auto& [name, microseconds] : candidates) {
    text += "  " + name + ": expected " + with_unit(microseconds) + (name == taken ? ", taken" : "") + "\n";
  }
  std::fputs((text + "  " + time + "\n").c_str(), stderr);
}

void explain(const Context& context, const std::string& problem, std::vector<Explained> candidates,
             const std::string& taken, const std::function<void()>& call) {
  explain(context, problem, std::move(candidates), [&] { return call(), taken; });
}

bool writes_over(std::initializer_list<const void*> results, std::initializer_list<const void*> operands) {
  return std::ranges::any_of(results, [&](const void* result) {
    return result != nullptr && std::ranges::find(operands, result) != operands.end();
  });
}

}  // namespace fretwork
