// Recent patterns by their keys, and the texts behind keys that are digests.
#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/hash.h"
#include "fretwork/error.h"
#include "pattern/regular.h"
#include "pattern/text.h"

namespace fretwork {
namespace {

/// Keys this long or shorter are the text itself.
constexpr std::size_t kLongText = 128;

/// What remembering a pattern costs, in units of some 32 bytes.
std::int64_t weight(const Pattern& pattern) {
  const auto* regular = dynamic_cast<const RegularPattern*>(&pattern);
  if (regular == nullptr) {
    return pattern.nnz();
  }
  constexpr std::int64_t kPart = sizeof(Part) / 32;
  std::int64_t all = 0;
  for (const PartGroup& group : regular->groups()) {
    all += static_cast<std::int64_t>(group.parts.size()) * kPart;
  }
  return all;
}

/// Texts behind digests and patterns, the most recently used ones of each (a compiled graph may outlast the pattern it
/// was made with), and every text that is held.
class Memory {
 public:
  void keep(const std::string& key, const std::string& text) {
    const std::lock_guard lock(mutex_);
    keep_text(key, text);
  }

  void hold(const std::string& key, const std::string& text) {
    const std::lock_guard lock(mutex_);
    const Texts::iterator kept = keep_text(key, text);
    if (kept->holders++ == 0) {
      text_bytes_ -= kept->text.size();
      held_.splice(held_.begin(), texts_, kept);
    }
  }

  void let_go(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = text_at_.find(key);
    if (found != text_at_.end() && found->second->holders > 0 && --found->second->holders == 0) {
      text_bytes_ += found->second->text.size();
      texts_.splice(texts_.begin(), held_, found->second);
      forget_texts();
    }
  }

  PatternPtr find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = recent_.find(key);
    if (found == recent_.end()) {
      return nullptr;
    }
    order_.splice(order_.begin(), order_, found->second);
    touch_text(key);
    return found->second->second;
  }

  void remember(const std::string& key, PatternPtr pattern) {
    const std::lock_guard lock(mutex_);
    if (recent_.contains(key)) {
      return;
    }
    stored_ += weight(*pattern);
    order_.emplace_front(key, std::move(pattern));
    recent_.emplace(key, order_.begin());
    while (order_.size() > 1 && (order_.size() > kRecent || stored_ > kStored)) {
      stored_ -= weight(*order_.back().second);
      recent_.erase(order_.back().first);
      order_.pop_back();
    }
  }

  std::string text_behind(std::string_view key) {
    const std::lock_guard lock(mutex_);
    const std::string* const text = touch_text(std::string(key));
    if (text == nullptr) {
      throw Error("Pattern.parse", "text", "the text of a pattern, or the digest of one made in this process",
                  "'" + std::string(key) + "', which is unknown here");
    }
    return *text;
  }

 private:
  struct Text {
    std::string key, text;
    int holders = 0;
  };
  using Texts = std::list<Text>;

  // The lock is held in these.

  Texts::iterator keep_text(const std::string& key, const std::string& text) {
    if (touch_text(key) == nullptr) {
      texts_.push_front({key, text});
      text_at_.emplace(key, texts_.begin());
      text_bytes_ += text.size();
      forget_texts();
    }
    return text_at_.at(key);
  }

  void forget_texts() {
    while (texts_.size() > 1 && text_bytes_ > kTextBytes) {
      text_bytes_ -= texts_.back().text.size();
      text_at_.erase(texts_.back().key);
      texts_.pop_back();
    }
  }

  /// The text behind a key, now the most recent of those not held; null if there is none.
  const std::string* touch_text(const std::string& key) {
    const auto found = text_at_.find(key);
    if (found == text_at_.end()) {
      return nullptr;
    }
    if (found->second->holders == 0) {
      texts_.splice(texts_.begin(), texts_, found->second);
    }
    return &found->second->text;
  }

  static constexpr std::size_t kTextBytes = std::size_t{256} << 20;
  static constexpr std::size_t kRecent = 256;         // patterns,
  static constexpr std::int64_t kStored = 8'000'000;  // and what they store together, some 32 bytes each
  using Order = std::list<std::pair<std::string, PatternPtr>>;
  std::mutex mutex_;
  Texts texts_, held_;
  std::unordered_map<std::string, Texts::iterator> text_at_;
  std::size_t text_bytes_ = 0;  // of those not held
  Order order_;
  std::int64_t stored_ = 0;
  std::unordered_map<std::string, Order::iterator> recent_;
};

/// Never destroyed: patterns may be asked for while the process ends.
Memory& memory() {
  static Memory& the = *std::make_unique<Memory>().release();
  return the;
}

/// The text itself, or "name@digest" for a long one.
std::string key_of(std::string_view text) {
  if (text.size() <= kLongText) {
    return std::string(text);
  }
  return std::string(text.substr(0, text.find('('))) + "@" + hash128(text).hex();
}

}  // namespace

void Pattern::name(std::string text) {
  text_ = std::move(text);
  key_ = key_of(text_);
  if (key_ != text_) {
    memory().keep(key_, text_);
  }
}

void Pattern::clear(std::span<std::uint8_t> out) const {
  const auto all = std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>{});
  if (static_cast<std::int64_t>(out.size()) != all) {
    throw Error("mask", "out", std::to_string(all), std::to_string(out.size()));
  }
  std::fill(out.begin(), out.end(), std::uint8_t{0});
}

PatternPtr text::remembered(PatternPtr pattern) {
  memory().remember(pattern->key(), pattern);
  return pattern;
}

void text::hold(const Pattern& pattern) { memory().hold(pattern.key(), pattern.text()); }

void text::let_go(const std::string& key) { memory().let_go(key); }

PatternPtr parse_pattern(std::string_view text) {
  const std::string key = key_of(text);
  if (PatternPtr known = memory().find(key)) {
    return known;
  }
  const bool digest = text.find('@') != text.npos && text.find('(') == text.npos;
  PatternPtr pattern = text::make(text::parse(digest ? memory().text_behind(text) : text));
  memory().remember(key, pattern);
  return pattern;
}

std::vector<PatternPtr> parse_patterns(std::string_view lines) {
  std::vector<PatternPtr> patterns;
  const std::string_view first = lines.substr(0, lines.find('\n'));
  for (std::size_t begin = 0; begin <= lines.size();) {
    const std::size_t end = std::min(lines.find('\n', begin), lines.size());
    const std::string_view line = lines.substr(begin, end - begin);
    patterns.push_back(!patterns.empty() && line == first ? patterns.front() : parse_pattern(line));  // often all equal
    begin = end + 1;
  }
  return patterns;
}

}  // namespace fretwork
