// How an op chooses between its kernels: candidates with a cost in microseconds (runtime/cost.h), the cheapest of them,
// a memory for what was chosen lately, and FRETWORK_EXPLAIN, which prints all that.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "fretwork/context.h"

namespace fretwork {

/// The GPU that a kernel is chosen for.
struct Machine {
  std::string arch;  ///< whose kernels run, such as "sm_90a"; FRETWORK_ARCH may lower it
  int number = 0;    ///< of the architecture: 90
  int multiprocessors = 0;
  int shared = 0;                         ///< bytes of shared memory that a CTA may ask for
  Precision precision = Precision::ieee;  ///< of fp32 products
  int device = -1;                        ///< its index; −1 for plans without a GPU
};
Machine machine_of(const Context& context);
/// A usual GPU of that architecture, for plans without one.
Machine typical_machine(const std::string& arch, Precision precision = Precision::ieee);

/// One way to run a call, and how long it should take.
template <typename Config>
struct Candidate {
  Config config{};
  double microseconds = 0;
};

/// Of a list that is not empty. Costs that agree to nine digits are the same, so that rounding decides nothing; the
/// first of them is the cheapest.
template <typename Config, typename List>
auto& cheapest(List&& candidates) {
  return *std::ranges::min_element(candidates, [](const Candidate<Config>& a, const Candidate<Config>& b) {
    return a.microseconds < (1 - 1e-9) * b.microseconds;
  });
}

/// Runs the cheapest candidate that can run, and returns its config. `run` answers false, having done nothing, where a
/// config cannot run; one of them always can.
template <typename Config, typename Run>
Config run_cheapest(std::vector<Candidate<Config>> candidates, const Run& run) {
  while (true) {
    Candidate<Config>& best = cheapest<Config>(candidates);
    if (run(best.config)) {
      return std::move(best.config);
    }
    candidates.erase(candidates.begin() + (&best - candidates.data()));
  }
}

/// What was chosen lately for problems with the same numbers, as choosing takes longer than a launch. For one thread. A
/// later problem may take over a slot.
template <std::size_t kNumbers, typename Config>
class Lately {
 public:
  using Key = std::array<std::int64_t, kNumbers>;

  template <typename Choose>
  const Config& get(const Key& key, Choose&& choose) {
    std::uint64_t mixed = 0;
    for (const std::int64_t number : key) {
      mixed = (mixed ^ static_cast<std::uint64_t>(number)) * 0x9e37'79b9'7f4a'7c15;
      mixed ^= mixed >> 32;
    }
    Slot& slot = slots_[mixed % slots_.size()];
    if (!slot.used || slot.key != key) {
      slot.config = choose();
      slot.key = key;
      slot.used = true;
    }
    return slot.config;
  }

 private:
  struct Slot {
    Key key{};
    Config config{};
    bool used = false;
  };
  std::array<Slot, 64> slots_{};
};

/// Parts of such a key: the type, and what of the context and the environment decides on kernels; and where addresses
/// lie within 16 bytes.
std::int64_t settings_of(DType dtype, const Context& context);
std::int64_t address_bits(std::initializer_list<const void*> addresses);

/// Whether calls on a GPU say which kernels they could take: FRETWORK_EXPLAIN=1, or explain_calls(true).
bool explains();
void explain_calls(bool yes);

/// A candidate in words.
struct Explained {
  std::string name;
  double microseconds;
};
/// Runs `call`, which answers the name of the candidate that it took, and prints to standard error what was called, the
/// candidates with their costs, the one taken and the time it took. The time is the mean of ten more calls,
/// when kernels have been compiled. A call that writes over its operands runs once. While a graph is captured, it runs
/// once and is not timed.
void explain(const Context& context, const std::string& problem, std::vector<Explained> candidates,
             const std::function<std::string()>& call, bool writes_over_operands = false);
/// The same where it is known what will be taken, and no operand is written over.
void explain(const Context& context, const std::string& problem, std::vector<Explained> candidates,
             const std::string& taken, const std::function<void()>& call);
/// The same with run_cheapest. The config's own `text_of` names it.
template <typename Config, typename Run>
void explain_cheapest(const Context& context, const std::string& problem,
                      const std::vector<Candidate<Config>>& candidates, const Run& run, bool writes_over_operands) {
  std::vector<Explained> list;
  for (const auto& [config, microseconds] : candidates) {
    list.push_back({text_of(config), microseconds});
  }
  const auto call = [&] { return text_of(run_cheapest(candidates, run)); };
  explain(context, problem, std::move(list), call, writes_over_operands);
}
/// Whether a result is where an operand is. Either may be absent: null.
bool writes_over(std::initializer_list<const void*> results, std::initializer_list<const void*> operands);

}  // namespace fretwork
