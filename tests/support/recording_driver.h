// What the recording driver has written down: see recording_driver.cpp.
#pragma once

#include <cstddef>

namespace fretwork {

struct RecordedLaunch {
  const char* kernel;  ///< its instantiation
  unsigned grid, threads, shared_bytes;
};

/// All launches so far. Found by name: extern "C" recorded_launches.
using RecordedLaunches = std::size_t (*)(const RecordedLaunch** first);
/// Whether streams are captured into a graph from now on. Found by name: extern "C" record_capture.
using RecordCapture = void (*)(bool yes);

}  // namespace fretwork
