// Questions to the terminal, and text that people read.
#include "terminal.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fretwork::cli {

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

bool wants_colour() {
  const char* const no_colour = std::getenv("NO_COLOR");
  const char* const kind = std::getenv("TERM");
  return is_terminal(stdout) && (no_colour == nullptr || *no_colour == '\0') &&
         (kind == nullptr || std::strcmp(kind, "dumb") != 0);
}

int terminal_width() {
  constexpr int kUsual = 80;
  if (winsize size{}; ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    return size.ws_col;
  }
  const char* const columns = std::getenv("COLUMNS");
  const int given = columns != nullptr ? std::atoi(columns) : 0;
  return given > 0 ? given : kUsual;
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(kUnits); ++unit) {
    bytes /= 1024;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string count_text(long long count) {
  const std::string digits = std::to_string(count);
  std::string text;
  for (std::size_t n = 0; n < digits.size(); ++n) {
    text += n > 0 && (digits.size() - n) % 3 == 0 ? "," : "";
    text += digits[n];
  }
  return text;
}

Progress::Progress(int total, bool hidden) : visible_(!hidden && is_terminal(stderr)), total_(std::max(total, 1)) {}

Progress::~Progress() { hide(); }

void Progress::show(const std::string& what) {
  if (!visible_) {
    return;
  }
  constexpr int kLength = 24;
  std::string bar;
  for (int n = 0; n < kLength; ++n) {
    bar += n < kLength * done_ / total_ ? "█" : "░";
  }
  const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  const std::string left = done_ > 0 ? fmt::format(", {:.0f} s left", spent / done_ * (total_ - done_)) : "";
  fmt::print(stderr, "\r{} {}/{} {}{}\033[K", bar, done_, total_, what, left);
  std::fflush(stderr);
}

void Progress::hide() {
  if (visible_) {
    fmt::print(stderr, "\r\033[K");
    std::fflush(stderr);
  }
}

}  // namespace fretwork::cli
