// The grammar of pattern texts, and the families that they name.
#include "pattern/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "fretwork/error.h"

namespace fretwork::text {
namespace {

constexpr int kMaxDepth = 64;
/// A short text must not ask for unbounded memory.
constexpr std::uint64_t kLongestRange = std::uint64_t{1} << 24;
constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

bool starts_name(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Recursive descent over one line.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Call whole() {
    Call call = expression(0);
    if (skip(); at_ < text_.size()) {
      fail("the end of the pattern");
    }
    return call;
  }

 private:
  // expression := term ('|' term)*;  term := call ('&' call)*
  Call expression(int depth) {
    return chain(depth, '|', "union",
                 [this](int d) { return chain(d, '&', "intersection", [this](int inner) { return single(inner); }); });
  }

  template <typename Next>
  Call chain(int depth, char symbol, const char* name, const Next& next) {
    Call first = next(depth);
    if (!peek(symbol)) {
      return first;
    }
    Call all{name, {}};
    all.arguments.push_back({std::move(first)});
    while (take(symbol)) {
      all.arguments.push_back({next(depth)});
    }
    return all;
  }

  Call single(int depth) {
    if (depth > kMaxDepth) {
      fail("at most 64 levels of nesting");
    }
    Call call;
    if (begun_) {
      call = std::move(*begun_);
      begun_.reset();
    } else if (take('(')) {
      call = expression(depth + 1);
      need(')');
    } else {
      call = plain(depth);
    }
    return with_postfixes(depth, std::move(call));
  }

  // call := … ('.T' | '[' slice (',' slice)? ']')*;  slice := integer? ':' integer?
  Call with_postfixes(int depth, Call call) {
    bool turned = false;  // two transpositions cancel, however many there are
    const auto turn = [&] {
      if (std::exchange(turned, false)) {
        call = Call{"transpose", {Value{std::move(call)}}};
      }
    };
    while (true) {
      if (take('.')) {
        need('T');
        turned = !turned;
      } else if (take('[')) {
        turn();
        if (++depth > kMaxDepth) {
          fail("at most 64 levels of nesting");
        }
        Call slice{"slice", {Value{std::move(call)}}};
        ends(slice);
        if (take(',')) {
          ends(slice);
        } else {
          slice.arguments.resize(5, Value{std::string("None")});
        }
        need(']');
        call = std::move(slice);
      } else {
        turn();
        return call;
      }
    }
  }

  // The ends of a slice, None where there is none.
  void ends(Call& slice) {
    const auto end = [&] {
      skip();
      const bool given = at_ < text_.size() && (is_digit(text_[at_]) || text_[at_] == '-');
      slice.arguments.push_back(given ? number_token() : Value{std::string("None")});
    };
    end();
    need(':');
    end();
  }

  Call plain(int depth) {
    skip();
    if (at_ >= text_.size() || !starts_name(text_[at_])) {
      fail("a pattern's name");
    }
    Call call{std::string(name_token()), {}};
    need('(');
    list(depth + 1, ')', [&] {
      std::string keyword = keyword_token();
      if (!call.keywords.empty() && keyword.empty()) {
        fail("a keyword, as the one before");
      }
      if (!keyword.empty()) {
        call.keywords.push_back(std::move(keyword));
      }
      call.arguments.push_back(value(depth + 1));
    });
    return call;
  }

  // Items up to the closing bracket, which it takes; whether the last had a comma behind it, as in (16,).
  template <typename Item>
  bool list(int depth, char close, const Item& item) {
    if (depth > kMaxDepth) {
      fail("at most 64 levels of nesting");
    }
    for (bool first = true; !take(close); first = false) {
      if (!first) {
        if (!take(',')) {
          fail(std::string("',' or '") + close + "'");
        }
        if (take(close)) {
          return true;
        }
      }
      item();
    }
    return false;
  }

  // The word before a '=', or nothing taken.
  std::string keyword_token() {
    skip();
    const std::size_t before = at_;
    if (at_ < text_.size() && starts_name(text_[at_])) {
      std::string name(name_token());
      if (take('=')) {
        return name;
      }
      at_ = before;
    }
    return {};
  }

  Value value(int depth) {
    if (depth > kMaxDepth) {
      fail("at most 64 levels of nesting");
    }
    skip();
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (c == '(' || c == '[') {
      ++at_;
      Tuple values;
      const bool comma = list(depth + 1, c == '(' ? ')' : ']', [&] { values.push_back(value(depth + 1)); });
      if (c == '(' && values.size() == 1 && !comma && std::holds_alternative<Call>(values[0].is)) {
        begun_ = std::get<Call>(std::move(values[0].is));  // no tuple: a pattern in brackets, on which more may follow
        return {expression(depth + 1)};
      }
      return {std::move(values)};
    }
    if (c == '~') {
      ++at_;
      return {std::string(take_while([](char x) { return starts_name(x) || is_digit(x) || x == '-'; }))};
    }
    if (is_digit(c) || c == '-' || c == '.') {
      return number_token();
    }
    if (!starts_name(c)) {
      fail("an argument");
    }
    const std::size_t before = at_;
    std::string name(name_token());
    if (!peek('(')) {
      return {std::move(name)};
    }
    at_ = before;
    return {expression(depth + 1)};
  }

  Value number_token() {
    const std::string_view token =
        take_while([](char x) { return is_digit(x) || x == '-' || x == '.' || x == 'e' || x == '+'; });
    const char* const end = token.data() + token.size();
    if (std::int64_t whole = 0; token.find_first_of(".e") == token.npos) {
      if (const auto [stop, error] = std::from_chars(token.data(), end, whole); error == std::errc{} && stop == end) {
        return {whole};
      }
    } else {
      double decimal = 0;
      if (const auto [stop, error] = std::from_chars(token.data(), end, decimal); error == std::errc{} && stop == end) {
        return {decimal};
      }
    }
    at_ -= token.size();
    fail("a number within 64 bits");
  }

  std::string_view name_token() {
    return take_while([](char x) { return starts_name(x) || is_digit(x); });
  }

  template <typename Accept>
  std::string_view take_while(const Accept& accept) {
    const std::size_t begin = at_;
    while (at_ < text_.size() && accept(text_[at_])) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  void skip() {
    take_while([](char c) { return c == ' ' || c == '\t'; });
  }
  bool peek(char c) {
    skip();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) { return peek(c) && (++at_, true); }
  void need(char c) {
    if (!take(c)) {
      fail(std::string("'") + c + "'");
    }
  }

  [[noreturn]] void fail(const std::string& expected) const {
    std::string rest(text_.substr(at_, 24));
    // A message is one line, and a C string ends at a zero.
    std::replace_if(
        rest.begin(), rest.end(), [](char c) { return c >= 0 && c < ' '; }, '?');
    throw Error("Pattern.parse", "text", expected,
                (rest.empty() ? "the end" : "'" + rest + "'") + " at position " + std::to_string(at_));
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::optional<Call> begun_;  ///< the first operand of the expression that comes next, read already
};

std::map<std::string, Maker, std::less<>>& families() {
  static std::map<std::string, Maker, std::less<>> all;
  return all;
}

std::string describe(const Value& value) {
  constexpr const char* kKinds[] = {"an integer", "a decimal", "a word", "a tuple", "a pattern"};
  return kKinds[value.is.index()];
}

template <typename T>
const T* argument_if(const Call& call, std::size_t position) {
  return position < call.arguments.size() ? std::get_if<T>(&call.arguments[position].is) : nullptr;
}

[[noreturn]] void wrong_kind(const Call& call, std::size_t position, const char* argument, const char* expected) {
  const bool there = position < call.arguments.size();
  throw Error(call.name, argument, expected, there ? describe(call.arguments[position]) : "nothing");
}

/// range(stop), range(start, stop) or range(start, stop, step), as Python counts, upwards.
std::vector<std::int64_t> counted(const Call& range) {
  const std::size_t given = range.arguments.size();
  const std::int64_t start = given > 1 ? integer(range, 0, "start") : 0;
  const std::int64_t stop = integer(range, given > 1 ? 1 : 0, "stop"), step = given > 2 ? integer(range, 2, "step") : 1;
  if (given > 3 || !range.keywords.empty() || step < 1) {
    throw Error("range", "arguments", "stop, or start and stop, and a step of at least 1", "others");
  }
  const auto length = static_cast<std::uint64_t>(stop) - static_cast<std::uint64_t>(start);
  const std::uint64_t count = stop > start ? (length - 1) / static_cast<std::uint64_t>(step) + 1 : 0;
  if (count > kLongestRange) {
    throw Error("range", "arguments", "at most 2^24 integers", std::to_string(count));
  }
  std::vector<std::int64_t> all(count);
  for (std::size_t n = 0; n < all.size(); ++n) {
    all[n] = start + static_cast<std::int64_t>(n) * step;
  }
  return all;
}

}  // namespace

Call parse(std::string_view text) { return Parser(text).whole(); }

Family::Family(const char* name, Maker maker) { families().emplace(name, maker); }

std::int64_t integer(const Call& call, std::size_t position, const char* argument) {
  if (const auto* value = argument_if<std::int64_t>(call, position)) {
    return *value;
  }
  wrong_kind(call, position, argument, "an integer");
}

double number(const Call& call, std::size_t position, const char* argument) {
  if (const auto* value = argument_if<double>(call, position)) {
    return *value;
  }
  if (const auto* value = argument_if<std::int64_t>(call, position)) {
    return static_cast<double>(*value);
  }
  wrong_kind(call, position, argument, "a number");
}

const std::string& word(const Call& call, std::size_t position, const char* argument) {
  if (const auto* value = argument_if<std::string>(call, position)) {
    return *value;
  }
  wrong_kind(call, position, argument, "a word");
}

std::vector<std::int64_t> integers(const Call& call, std::size_t position, const char* argument) {
  if (const auto* value = argument_if<std::int64_t>(call, position)) {
    return {*value};
  }
  std::vector<std::int64_t> all;
  if (const auto* tuple = argument_if<Tuple>(call, position)) {
    for (const Value& value : *tuple) {
      const auto* one = std::get_if<std::int64_t>(&value.is);
      if (one == nullptr) {
        throw Error(call.name, argument, "integers only", describe(value) + " among them");
      }
      all.push_back(*one);
    }
    return all;
  }
  if (const auto* range = argument_if<Call>(call, position); range != nullptr && range->name == "range") {
    return counted(*range);
  }
  wrong_kind(call, position, argument, "an integer or a tuple of them");
}

void expect_arguments(const Call& call, std::size_t count, const char* form) {
  if (!call.keywords.empty()) {
    throw Error(call.name, call.keywords.front(), "no keyword", "one");
  }
  if (call.arguments.size() != count) {
    throw Error(call.name, "arguments", form, std::to_string(call.arguments.size()) + " of them");
  }
}

std::string pack_bits(std::span<const std::uint8_t> mask) {
  std::string digits((mask.size() + 5) / 6, 'A');
  for (std::size_t n = 0; n < digits.size(); ++n) {
    std::size_t six = 0;
    for (std::size_t bit = 0; bit < 6 && 6 * n + bit < mask.size(); ++bit) {
      six |= static_cast<std::size_t>(mask[6 * n + bit]) << bit;
    }
    digits[n] = kDigits[six];
  }
  return digits;
}

std::string shortest(double number) {
  std::array<char, 32> digits;
  return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr};
}

std::vector<std::uint8_t> bits(const Call& call, std::size_t position, const char* argument, std::size_t count) {
  const std::string& digits = word(call, position, argument);
  if (digits.size() != (count + 5) / 6) {
    throw Error(call.name, argument, std::to_string((count + 5) / 6) + " of them", std::to_string(digits.size()));
  }
  std::vector<std::uint8_t> mask(count);
  for (std::size_t n = 0; n < digits.size(); ++n) {
    const std::size_t six = kDigits.find(digits[n]);
    const std::size_t used = std::min<std::size_t>(6, count - 6 * n);
    if (six >> used != 0) {
      throw Error(call.name, argument, "zeros after the last", std::string("'") + digits[n] + "'");
    }
    for (std::size_t bit = 0; bit < used; ++bit) {
      mask[6 * n + bit] = static_cast<std::uint8_t>(six >> bit & 1);
    }
  }
  return mask;
}

Call ordered(const Call& call, std::initializer_list<const char*> needed, std::initializer_list<const char*> others) {
  std::vector<std::string> names(needed.begin(), needed.end());
  names.insert(names.end(), others.begin(), others.end());
  const std::size_t plain = call.arguments.size() - call.keywords.size();
  // An offset is one by its name alone, as in Python.
  const std::size_t most = names.size() - (names.back() == "offset" ? 1 : 0);
  if (plain > most) {
    throw Error(call.name, "arguments", "at most " + std::to_string(most) + " without names", std::to_string(plain));
  }
  Call all{call.name, std::vector<Value>(names.size(), Value{std::string("None")})};
  std::copy_n(call.arguments.begin(), plain, all.arguments.begin());
  std::vector<bool> given(names.size());
  std::fill_n(given.begin(), plain, true);
  for (std::size_t n = 0; n < call.keywords.size(); ++n) {
    const std::string& keyword = call.keywords[n];
    const auto place = static_cast<std::size_t>(std::find(names.begin(), names.end(), keyword) - names.begin());
    if (place == names.size()) {
      std::string known = "one of " + names[0];
      for (std::size_t other = 1; other < names.size(); ++other) {
        known += ", " + names[other];
      }
      throw Error(call.name, "keyword", known, keyword);
    }
    if (given[place]) {
      throw Error(call.name, keyword, "one value", "two");
    }
    given[place] = true;
    all.arguments[place] = call.arguments[plain + n];
  }
  for (std::size_t n = 0; n < needed.size(); ++n) {
    if (!given[n]) {
      throw Error(call.name, names[n], "a value", "nothing");
    }
  }
  return all;
}

bool is_none(const Call& call, std::size_t position) {
  const auto* value = argument_if<std::string>(call, position);
  return value != nullptr && *value == "None";
}

std::vector<std::string> operands(const std::string& text, char symbol) {
  std::vector<std::string> all(1);
  int depth = 0;
  for (const char c : text) {
    depth += (c == '(') - (c == ')');
    if (depth == 0 && c == symbol) {
      all.emplace_back();
    } else {
      all.back() += c;
    }
  }
  return all;
}

bool is_compound(const std::string& text) { return operands(text, '|').size() + operands(text, '&').size() > 2; }

std::string bracketed(const std::string& text) { return is_compound(text) ? "(" + text + ")" : text; }

std::optional<SlicedFrom> sliced_from(const std::string& text) {
  if (!text.ends_with(']') || is_compound(text)) {
    return std::nullopt;
  }
  const std::size_t bracket = text.rfind('['), comma = text.find(',', bracket);
  std::string pattern = text.substr(0, bracket);
  if (pattern.front() == '(' && pattern.back() == ')') {
    pattern = pattern.substr(1, pattern.size() - 2);
  }
  return SlicedFrom{std::move(pattern), {std::stoll(text.substr(bracket + 1)), std::stoll(text.substr(comma + 1))}};
}

namespace {

/// Insertions, deletions and exchanges of letters between two words.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({changed, row[j + 1] + 1, row[j] + 1}));
    }
  }
  return row.back();
}

/// The family that a name is nearest to, if it is within a third of its letters; else the one that it begins.
std::string nearest(const std::string& given) {
  std::string best;
  std::size_t least = std::max<std::size_t>(1, given.size() / 3) + 1;
  for (const auto& [name, maker] : families()) {
    if (const std::size_t far = distance(given, name); far < least) {
      best = name;
      least = far;
    }
  }
  for (const auto& [name, maker] : families()) {
    if (best.empty() && given.size() >= 3 && name.starts_with(given)) {
      best = name;
    }
  }
  return best;
}

}  // namespace

PatternPtr make(const Call& call) {
  const auto family = families().find(call.name);
  if (family != families().end()) {
    return family->second(call);
  }
  if (const std::string near = nearest(call.name); !near.empty()) {
    throw Error("Pattern.parse", "text", "the name of a pattern", "'" + call.name + "'; did you mean " + near + "?");
  }
  std::string known;
  for (const auto& [name, maker] : families()) {
    known += (known.empty() ? "" : ", ") + name;
  }
  throw Error("Pattern.parse", "text", "one of " + known, "'" + call.name + "'");
}

}  // namespace fretwork::text
