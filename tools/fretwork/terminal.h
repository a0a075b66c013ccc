// What the program knows of the terminal it writes to: width, colour, and a progress bar.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

namespace fretwork::cli {

bool is_terminal(std::FILE* stream);
/// True when standard output is a terminal that shows colours and NO_COLOR is not set.
bool wants_colour();
/// Columns of the terminal behind standard output, else $COLUMNS, else 80.
int terminal_width();

/// "12.3 MiB", "512 B".
std::string bytes_text(double bytes);
/// "1,234,567".
std::string count_text(long long count);

/// A bar on standard error while it is a terminal, and nothing otherwise. Gone when the object goes.
class Progress {
 public:
  /// `hidden`: nothing is shown, because others write to the terminal.
  explicit Progress(int total, bool hidden = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Says what is being done now, the bar's length being what is done already.
  void show(const std::string& what);
  void advance() { ++done_; }
  /// Clears the line, for output that goes to the same terminal.
  void hide();

 private:
  bool visible_;
  int total_, done_ = 0;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace fretwork::cli
