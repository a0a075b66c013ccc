// The text form of patterns: name(argument, …, keyword=argument). A family joins by registering a maker under its name;
// the grammar knows no family. Arguments are integers, decimals, words (~bits, names), tuples in () or [], and other
// patterns; `|`, `&`, `.T` and [begin:end, begin:end] become calls of "union", "intersection", "transpose" and "slice".
#pragma once

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fretwork/pattern.h"

namespace fretwork::text {

struct Value;
using Tuple = std::vector<Value>;

struct Call {
  std::string name;
  std::vector<Value> arguments;
  std::vector<std::string> keywords = {};  ///< the names of the last of the arguments
};

struct Value {
  std::variant<std::int64_t, double, std::string, Tuple, Call> is;
};

/// Throws Error, naming the place, on anything that does not follow the grammar or nests deeper than 64.
Call parse(std::string_view text);

/// A family's way in: `maker` gets a call of that name, checks it and makes the pattern.
using Maker = PatternPtr (*)(const Call&);
/// For a namespace-scope object in the family's file.
struct Family {
  Family(const char* name, Maker maker);
};

/// What canonical texts are made of: the operands between `symbol` outside all brackets, the text itself if it does not
/// occur; whether | or & joins several; the text as what a postfix may follow.
std::vector<std::string> operands(const std::string& text, char symbol);
bool is_compound(const std::string& text);
std::string bracketed(const std::string& text);
/// What a slice is of, and the row and column at which it begins; nothing for other texts.
struct SlicedFrom {
  std::string pattern;
  std::array<std::int64_t, 2> at;
};
std::optional<SlicedFrom> sliced_from(const std::string& text);

/// The pattern that a call describes.
PatternPtr make(const Call& call);
/// The same pattern, which parse_pattern will then find by its key: who made one by other means need not parse it.
PatternPtr remembered(PatternPtr pattern);
/// Keeps the text behind a pattern's key known, though the pattern may go, until it is let go as often.
void hold(const Pattern& pattern);
void let_go(const std::string& key);

/// What a maker reads its arguments with: throws Error "name: argument: expected …, got …" on another kind.
std::int64_t integer(const Call& call, std::size_t position, const char* argument);
double number(const Call& call, std::size_t position, const char* argument);
const std::string& word(const Call& call, std::size_t position, const char* argument);
/// A tuple of integers, or range(…); a single integer counts as a tuple of one.
std::vector<std::int64_t> integers(const Call& call, std::size_t position, const char* argument);
/// `count` zeros and ones from a word of bits, six to a character; and the word for them.
std::vector<std::uint8_t> bits(const Call& call, std::size_t position, const char* argument, std::size_t count);
std::string pack_bits(std::span<const std::uint8_t> mask);
/// A number in as few digits as tell it from its neighbours.
std::string shortest(double number);
void expect_arguments(const Call& call, std::size_t count, const char* form);
/// The same call with its keywords put in their places: one argument for each of the names, the word None where one of
/// `others` is not given. Throws Error on one of `needed` that is missing, on keywords that are not among the names, on
/// two for one, and on too many.
Call ordered(const Call& call, std::initializer_list<const char*> needed,
             std::initializer_list<const char*> others = {});
/// Whether an argument is the word None.
bool is_none(const Call& call, std::size_t position);

}  // namespace fretwork::text
