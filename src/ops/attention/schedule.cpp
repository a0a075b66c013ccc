// How the tiles of attention are dealt out to CTAs.
#include "ops/attention/schedule.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "core/divide.h"

namespace fretwork::attention_op {
namespace {

/// Pairs go through their tiles together, the longest tiles first. A tile that takes longer than a CTA's share of such
/// a group would be waited for at the end: those go before all others. Groups are as even as can be: the short tiles
/// of the last one must fill the gaps that its long ones leave, and a single head of 128 causal tiles on 132 CTAs has
/// none to spare. A sixteenth of the steps, in tiles that are short beside the longest, fills what gaps are left at the
/// end of all.
std::vector<Task> order_tasks(const std::vector<int>& steps_of, const Pairs& pairs, bool empty, int ctas) {
  std::vector<int> order(steps_of.size());
  std::iota(order.begin(), order.end(), 0);
  const auto steps = [&](int tile) { return steps_of[static_cast<std::size_t>(tile)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return steps(a) > steps(b); });
  if (!empty) {
    while (!order.empty() && steps(order.back()) == 0) {
      order.pop_back();
    }
  }
  const std::int64_t all = static_cast<std::int64_t>(pairs.batch) * pairs.heads;
  const std::int64_t sum = std::accumulate(steps_of.begin(), steps_of.end(), std::int64_t{0});
  const std::int64_t share = sum * pairs.together / ctas;
  const auto rest = std::find_if(order.begin(), order.end(), [&](int tile) { return steps(tile) <= share; });
  auto last = order.end();
  for (std::int64_t left = sum / 16; last != rest && 4 * steps(last[-1]) < steps(*rest); --last) {
    left -= steps(last[-1]);
    if (left < 0) {
      break;
    }
  }
  std::vector<Task> tasks;
  tasks.reserve(order.size() * static_cast<std::size_t>(all));
  const auto add = [&](auto tile, auto stop, std::int64_t begin, std::int64_t end) {
    for (; tile != stop; ++tile) {
      for (std::int64_t n = begin; n < end; ++n) {
        tasks.push_back({*tile, pairs.backwards ? all - 1 - n : n});
      }
    }
  };
  add(order.begin(), rest, 0, all);
  const std::int64_t groups = ceil_div(all, std::int64_t{pairs.together});
  for (std::int64_t g = 0; g < groups; ++g) {
    add(rest, last, all * g / groups, all * (g + 1) / groups);
  }
  add(last, order.end(), 0, all);
  return tasks;
}

}  // namespace

std::vector<std::vector<Task>> deal_tasks(const std::vector<int>& steps, const Pairs& pairs, int repeat, bool empty,
                                          int ctas) {
  const std::vector<Task> tasks = order_tasks(steps, pairs, empty, ctas);
  const auto count = static_cast<int>(std::min<std::int64_t>(ctas, std::ssize(tasks)));
  std::vector<std::vector<Task>> lists(static_cast<std::size_t>(count));
  using Load = std::pair<std::int64_t, int>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int c = 0; c < count; ++c) {
    least.emplace(0, c);
  }
  for (const Task& task : tasks) {
    const auto [load, c] = least.top();
    least.pop();
    lists[static_cast<std::size_t>(c)].push_back(task);
    least.emplace(load + kItemOverhead + std::int64_t{steps[static_cast<std::size_t>(task.tile)]} * repeat, c);
  }
  std::vector<std::vector<Task>> longest_first;
  longest_first.reserve(lists.size());
  for (; !least.empty(); least.pop()) {
    longest_first.push_back(std::move(lists[static_cast<std::size_t>(least.top().second)]));
  }
  std::reverse(longest_first.begin(), longest_first.end());
  return longest_first;
}

}  // namespace fretwork::attention_op
