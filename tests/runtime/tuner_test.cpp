// The tuner without any op: who is dropped, who may win, what a killed run leaves, and what tables say.
#include "runtime/tuner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/error_text.h"

namespace fretwork {
namespace {

std::atomic<bool> go_on = false;  // never set

/// A candidate whose rounds take `times`, the last one for ever; counts its rounds.
TuneCandidate with_times(const std::string& name, std::vector<double> times, int* count,
                         Verdict verdict = {true, true, 0}) {
  return {name, [verdict] { return verdict; },
          [times, count] {
            const auto n = static_cast<std::size_t>((*count)++);
            return times[std::min(n, times.size() - 1)];
          }};
}

class Folder : public testing::Test {
 protected:
  Folder() : folder_(std::filesystem::path(testing::TempDir()) / ("tuner." + std::to_string(getpid()))) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~Folder() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path file(const char* name) const { return folder_ / name; }
  void write(const char* name, const std::string& text) const { std::ofstream(file(name)) << text; }
  std::filesystem::path folder_;
};
using TuningFileTest = Folder;
using TunedTableTest = Folder;

TEST(Race, DropsLosersEarlyAndKeepsTheRest) {
  int fast = 0, near = 0, slow = 0, hopeless = 0;
  const TuneCandidate all[] = {with_times("slow", {1.25}, &slow), with_times("fast", {1.0}, &fast),
                               with_times("near", {1.05}, &near), with_times("hopeless", {2.5}, &hopeless)};
  const auto finishes = race(all, {.rounds = 9, .favourite = ""}, go_on);
  ASSERT_TRUE(finishes);
  EXPECT_EQ(fast, 9);
  EXPECT_EQ(near, 9);
  EXPECT_EQ(slow, 3);      // within 1.3 of the leader for two rounds
  EXPECT_EQ(hopeless, 1);  // twice as slow at once
  EXPECT_EQ(winner_of(*finishes, {.rounds = 9, .favourite = ""})->name, "fast");
  EXPECT_EQ((*finishes)[3].rounds, std::vector<double>{2.5});
}

TEST(Race, KeepsAllWhereAsked) {
  int fast = 0, hopeless = 0;
  const TuneCandidate all[] = {with_times("fast", {1.0}, &fast), with_times("hopeless", {99.0}, &hopeless)};
  const auto finishes = race(all, {.rounds = 5, .favourite = "", .drops = false}, go_on);
  ASSERT_TRUE(finishes);
  EXPECT_EQ(fast, 5);
  EXPECT_EQ((*finishes)[1].rounds, std::vector<double>(5, 99.0));
}

TEST(Race, OneBadRoundDropsNobody) {
  int unlucky = 0, other = 0;
  const TuneCandidate all[] = {with_times("unlucky", {1.0, 9.0, 1.0, 9.0, 1.0}, &unlucky),
                               with_times("other", {1.08}, &other)};
  const auto finishes = race(all, {.rounds = 5, .favourite = ""}, go_on);
  EXPECT_EQ(unlucky, 5);
  EXPECT_EQ(winner_of(*finishes, {.rounds = 5, .favourite = ""})->name, "unlucky");
}

TEST(Race, WrongResultsNeverRun) {
  int wrong = 0, thrown = 0, foreign = 0, right = 0;
  TuneCandidate throwing = with_times("throws", {0.1}, &thrown);
  throwing.verify = []() -> Verdict { throw std::runtime_error("no such launch"); };
  const TuneCandidate all[] = {with_times("wrong", {0.1}, &wrong, {true, false, 3.5}), throwing,
                               with_times("foreign", {0.1}, &foreign, {}), with_times("right", {1.0}, &right)};
  const RaceOptions options{.rounds = 4, .favourite = "wrong"};
  const auto finishes = race(all, options, go_on);
  EXPECT_EQ(wrong + thrown + foreign, 0);
  EXPECT_EQ(winner_of(*finishes, options)->name, "right");
  EXPECT_EQ((*finishes)[0].verdict.mse, 3.5);
  EXPECT_EQ((*finishes)[1].error, "no such launch");
  EXPECT_EQ(winner_of(*race({all, 3}, options, go_on), options), nullptr);
}

TEST(Race, TheFavouriteIsMeasuredToTheEndAndStaysUnlessBeaten) {
  const auto winner = [](std::vector<double> favourite, std::vector<double> other) {
    int count = 0, rounds = 0;
    const TuneCandidate all[] = {with_times("usual", favourite, &count), with_times("other", other, &rounds)};
    const RaceOptions options{.rounds = 6, .favourite = "usual"};
    const auto finishes = race(all, options, go_on);
    EXPECT_EQ(count, 6);
    return winner_of(*finishes, options)->name;
  };
  EXPECT_EQ(winner({1.0}, {0.99}), "usual");  // no more than noise
  EXPECT_EQ(winner({1.0}, {0.9}), "other");
  EXPECT_EQ(winner({9.0}, {1.0}), "other");
  // A better median, but ahead in half of the rounds only.
  EXPECT_EQ(winner({1.0, 1.0, 1.0, 3.0, 3.0, 3.0}, {2.0, 2.0, 2.0, 0.9, 0.9, 0.9}), "usual");
  // Ahead in every round, by less than the rounds of a busy machine differ.
  EXPECT_EQ(winner({1.0, 3.0, 1.1, 2.9, 1.0, 3.1}, {0.9, 2.8, 1.0, 2.7, 0.9, 2.9}), "usual");
  // One bad round spoils neither a victory nor a defeat.
  EXPECT_EQ(winner({1.0}, {0.5, 0.5, 9.0, 0.5, 0.5, 0.5}), "other");
  EXPECT_EQ(winner({1.0, 1.0, 9.0, 1.0, 1.0, 1.0}, {1.0}), "usual");
}

TEST(Race, StopsWhenAsked) {
  std::atomic<bool> stop = false;
  int count = 0;
  TuneCandidate all[] = {with_times("one", {1.0}, &count)};
  all[0].round = [&] {
    stop = ++count == 3;
    return 1.0;
  };
  EXPECT_FALSE(race(all, {.rounds = 9, .favourite = ""}, stop));
  EXPECT_EQ(count, 3);
}

TEST(Times, AreMedianAndDeviation) {
  const Times times = times_of({3, 1, 2, 10, 4});
  EXPECT_EQ(times.ms, 3);
  EXPECT_NEAR(times.std, 3.16228, 1e-4);
  EXPECT_EQ(times.mean, 4);
  EXPECT_EQ(times.iqr, 2);
  EXPECT_EQ(times.rounds, (std::vector<double>{3, 1, 2, 10, 4}));
  EXPECT_NEAR(times_of({1, 2, 4, 8}).iqr, 3.25, 1e-12);  // 5 − 1.75, between rounds
  EXPECT_EQ(times_of({7}).iqr, 0);
}

TunedRow row(const std::string& choice, double ms) { return {choice, 100, ms, 0.125, 0.25, 2 * ms, {{choice, ms}}}; }

TEST_F(TuningFileTest, EveryRowIsThereForTheNextRun) {
  {
    TuningFile first(file("new/table.json"), "device", "op");
    EXPECT_EQ(first.find("p"), nullptr);
    first.add("p", row("a:1", 0.5));
    // As a process that is killed now would leave it.
    EXPECT_EQ(TunedTable::read(file("new/table.json")).find("device", "op")->at("p").choice, "a:1");
    first.add("q", row("b", 1.5));
  }
  TuningFile next(file("new/table.json"), "device", "op");
  ASSERT_NE(next.find("p"), nullptr);
  EXPECT_EQ(next.find("p")->choice, "a:1");
  EXPECT_EQ(next.find("q")->ms_of.at("b"), 1.5);
  EXPECT_EQ(next.find("r"), nullptr);
  next.add("p", row("c", 0.25));
  const TunedTable table = TunedTable::read(file("new/table.json"));
  EXPECT_EQ(table.find("device", "op")->size(), 2u);
  EXPECT_EQ(table.find("device", "op")->at("p").ms, 0.25);
  EXPECT_EQ(table.find("another", "op"), nullptr);
}

TEST_F(TuningFileTest, HasOneWriterAndLeavesNothingBeside) {
  {
    TuningFile first(file("table.json"), "device", "op");
    EXPECT_NE(error_of([&] { TuningFile(file("table.json"), "device", "op"); }).find("no other process"),
              std::string::npos);
    first.add("p", row("a", 1));
  }
  TuningFile(file("table.json"), "device", "op");
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    names.push_back(entry.path().filename());
  }
  EXPECT_EQ(names, std::vector<std::string>{"table.json"});
}

TEST_F(TuningFileTest, WritesOverNothingThatIsNoTable) {
  write("table.json", "precious");
  EXPECT_NE(error_of([&] { TuningFile(file("table.json"), "device", "op"); }).find("not a table"), std::string::npos);
  std::string kept;
  std::ifstream(file("table.json")) >> kept;
  EXPECT_EQ(kept, "precious");
}

TEST_F(TunedTableTest, SurvivesAFile) {
  TunedTable table;
  table.rows("a \"device\"", "op")["p q"] = row("x:1", 0.123456);
  table.write(file("t.json"));
  const TunedRow back = TunedTable::read(file("t.json")).find("a \"device\"", "op")->at("p q");
  EXPECT_EQ(back.choice, "x:1");
  EXPECT_EQ(back.batch, 100);
  EXPECT_NEAR(back.ms, 0.123456, 1e-4);
  EXPECT_EQ(back.std, 0.125);
  EXPECT_EQ(back.mse, 0.25);
  EXPECT_NEAR(back.heuristic_ms, 0.246912, 1e-3);
  EXPECT_TRUE(TunedTable::read(file("missing.json")).all().empty());
}

TEST_F(TunedTableTest, LinksStayLinksAndDevicesDevices) {
  TunedTable table;
  table.rows("d", "op")["p"] = row("x", 1);
  table.write(file("t.json"));
  std::filesystem::create_symlink("t.json", file("link.json"));
  table.rows("d", "op")["p"] = row("y", 1);
  table.write(file("link.json"));
  EXPECT_TRUE(std::filesystem::is_symlink(file("link.json")));
  EXPECT_EQ(TunedTable::read(file("t.json")).find("d", "op")->at("p").choice, "y");
  std::filesystem::create_symlink("/dev/full", file("full"));
  EXPECT_NE(error_of([&] { table.write(file("full")); }).find("cannot be written: No space"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_character_file(file("full")));
  EXPECT_NE(error_of([&] { table.write(folder_); }).find("cannot be written: Is a directory"), std::string::npos);
  EXPECT_NE(error_of([&] { TunedTable::read(folder_); }).find("cannot be read: Is a directory"), std::string::npos);
}

TEST_F(TunedTableTest, MergesTheFastest) {
  TunedTable one, two;
  one.rows("d", "op")["p"] = row("slow", 2);
  one.rows("d", "op")["q"] = row("fast", 1);
  two.rows("d", "op")["p"] = row("fast", 1);
  two.rows("d", "op")["q"] = row("slow", 2);
  two.rows("e", "op")["p"] = row("new", 3);
  EXPECT_EQ(one.merge(two), 2);
  EXPECT_EQ(one.find("d", "op")->at("p").choice, "fast");
  EXPECT_EQ(one.find("d", "op")->at("q").choice, "fast");
  EXPECT_EQ(one.find("e", "op")->at("p").choice, "new");
}

TEST_F(TunedTableTest, SaysWhatIsWrong) {
  for (const char* const bad : {"", "{", "[]", "{\"format\": 1}", "{\"format\": \"fretwork tuned 9\", \"devices\": {}}",
                                "{\"format\": \"fretwork tuned 1\"}",
                                "{\"format\": \"fretwork tuned 1\", \"devices\": {\"d\": {\"op\": {\"p\": {}}}}}",
                                "{\"format\": \"fretwork tuned 1\", \"devices\": {\"d\": {\"op\": 3}}}"}) {
    EXPECT_NE(error_of([&] { TunedTable::parse(bad); }), "no error") << bad;
  }
}

TEST_F(TunedTableTest, AFolderIsReadByNameAndBadFilesAreSkippedWithOneWarning) {
  TunedTable table;
  table.rows("d", "op")["p"] = row("from b", 1);
  table.write(file("b.json"));
  table.rows("d", "op")["p"] = row("from a", 1);
  table.write(file("a.json"));
  write("broken.json", "{\"format\": \"fretwork");
  write("notes.txt", "no table");
  testing::internal::CaptureStderr();
  const auto sources = read_tuned_sources(folder_);
  read_tuned_sources(folder_);
  const std::string warned = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(warned, '\n'), 1) << warned;
  EXPECT_NE(warned.find("broken.json"), std::string::npos);
  ASSERT_EQ(sources.size(), embedded_tables().size() + 2);
  EXPECT_EQ(sources[sources.size() - 2].name, file("a.json").string());
  EXPECT_EQ(sources.back().table.find("d", "op")->at("p").choice, "from b");
  EXPECT_EQ(read_tuned_sources(file("nowhere")).size(), embedded_tables().size());
}

// An op of numbers: problems and choices are their digits.
std::optional<int> number(std::string_view text) {
  return text.find_first_not_of("0123456789") == text.npos && !text.empty()
             ? std::optional(std::stoi(std::string(text)))
             : std::nullopt;
}
std::vector<TunedSource>& sources() {
  static std::vector<TunedSource> all;
  return all;
}

TEST(TunedChoices, LaterTablesCountAndUnknownOnesAreIgnoredWithOneWarning) {
  const std::string here = device_name({});
  const auto table = [&](std::map<std::string, std::string> rows) {
    TunedTable made;
    for (const auto& [problem, choice] : rows) {
      made.rows(here, "numbers")[problem] = row(choice, 1);
    }
    return made;
  };
  sources() = {{"shipped", table({{"1", "10"}, {"2", "20"}})},
               {"user", table({{"2", "21"}, {"3", "31"}})},
               {"newer", table({{"1", "99"}, {"2", "fast"}, {"3", "also unknown"}})}};
  using Choices = TunedChoices<int, int>;
  const auto read = []() -> const std::vector<TunedSource>& { return sources(); };
  static Choices& choices = *std::make_unique<Choices>("numbers", number, number, read).release();
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&] { choices.find({}, 1); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(choices.any({}));
  EXPECT_EQ(choices.find({}, 1)->choice, 10);
  EXPECT_EQ(choices.find({}, 2)->choice, 21);
  EXPECT_EQ(choices.find({}, 2)->source->name, "user");
  EXPECT_EQ(choices.find({}, 3)->choice, 31);
  EXPECT_EQ(choices.find({}, 4), nullptr);
  const std::string warned = testing::internal::GetCapturedStderr();
  EXPECT_EQ(warned, "fretwork: tuning table newer: this version knows no numbers choice 'fast' for '2'; ignored\n");
}

}  // namespace
}  // namespace fretwork
